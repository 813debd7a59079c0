"""How many drafts are accepted where the target's own first layers draft: the grid of `acceptance`, without public sets.

A table of its own: it takes no head and no look-up, so nothing that is trained anew changes it.
"""

from stepgraph.capture.experiments.acceptance import grid_of, headlines, table

__all__ = ["headlines", "measure", "table"]

measure = grid_of(("early-exit:20", "early-exit:26", "early-exit:28"), ())
