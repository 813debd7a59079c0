"""How many drafts are accepted where the target's own first layers draft: the grid of `acceptance`, without public sets.

A table of its own: it takes no head and no look-up, so nothing that is trained anew changes it.
"""

from collections.abc import Iterator

from stepgraph.capture.experiments.acceptance import MODEL, grid, headlines, quick_rows, table
from stepgraph.model.checkpoint import load_model

DRAFTERS = ("early-exit:20", "early-exit:26", "early-exit:28")

__all__ = ["DRAFTERS", "headlines", "measure", "table"]


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """The grid for three depths; `quick` is a small part."""
    yield from quick_rows(DRAFTERS[0], seed) if quick else grid(load_model(MODEL), DRAFTERS, (), seed)
