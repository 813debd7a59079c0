"""Which batches an op or a model part can be captured for in a graph."""

from enum import IntEnum


class CaptureSupport(IntEnum):
    """Ordered: each member supports what the smaller ones do.

    NEVER: no graph at all, it reads the host.
    UNIFORM_SINGLE_TOKEN: batches with one query token a request.
    UNIFORM_BATCH: batches in which every request has the same number of query tokens.
    ALWAYS: any batch, prefill chunks mixed in.
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3
