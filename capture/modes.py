"""How much of a step is inside graphs."""

from enum import StrEnum


class Mode(StrEnum):
    """How steps run; all modes compute the same step.

    FULL: the whole step in one graph.
    THREE_GRAPH: a graph each for draft, verify and (where the drafter has any) observe, sampling and commit operator by
        operator: what serving engines call full graphs.
    PIECEWISE: graphs between attention ops, attention and sampling tail operator by operator: what they fall back to.
    EAGER: no graph.
    """

    FULL = "FULL"
    THREE_GRAPH = "THREE_GRAPH"
    PIECEWISE = "PIECEWISE"
    EAGER = "EAGER"
