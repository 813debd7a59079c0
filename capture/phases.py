"""The named phases of a step: marks in its trace, and ranges in a profile."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.traceback import annotate
from torch.profiler import record_function

PHASES = ("draft", "verify", "accept", "observe", "advance")


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Everything inside belongs to one of `PHASES`: its nodes when the step is traced, a profiler range when it runs."""
    with annotate({"phase": name}) if get_proxy_mode() is not None else record_function(f"stepgraph.{name}"):
        yield


def phase_of(node: Node) -> str:
    """The phase of a traced node."""
    return node.meta["custom"]["phase"]
