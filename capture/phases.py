"""The named phases of a step: marks in its trace, and ranges in a profile."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import annotate
from torch.profiler import record_function

PHASES = ("draft", "verify", "accept", "observe", "advance")


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """A range `stepgraph.NAME` for torch.profiler and, where CUDA is in use, for NVTX."""
    if not torch.autograd._profiler_enabled() and not torch.cuda.is_initialized():
        yield  # nobody looks; opening a range takes longer than the rest of a launch's bookkeeping
        return
    label = f"stepgraph.{name}"
    with record_function(label):
        if torch.cuda.is_initialized():
            with torch.cuda.nvtx.range(label):
                yield
        else:
            yield


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Everything inside belongs to one of `PHASES`: its nodes when the step is traced, a profiler range when it runs."""
    with annotate({"phase": name}) if get_proxy_mode() is not None else named_range(name):
        yield


def phase_of(node: Node) -> str:
    """The phase of a traced node."""
    return node.meta["custom"]["phase"]
