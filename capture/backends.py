"""Capture of one key in one mode: CUDA graphs where there is CUDA, FX graphs elsewhere."""

from typing import NamedTuple, Protocol

import torch

from stepgraph.capture.cuda import capture_call, count_nodes, padding_only, warm_up
from stepgraph.capture.keys import GraphKey
from stepgraph.capture.modes import Mode
from stepgraph.capture.pieces import CUDAPieces, cut
from stepgraph.capture.step import SpeculativeStep
from stepgraph.capture.trace import trace_step


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None: ...


class Captured(NamedTuple):
    """A graph, and what it took.

    Attributes:
        graph: replays the step.
        nodes: in it; ops of the trace where it is an FX graph, None where CUDA does not tell.
        nbytes: device memory that the capture added to the pool, in bytes; an FX graph holds none.
        seconds: of the capture.
    """

    graph: Graph
    nodes: int | None
    nbytes: int
    seconds: float = 0.0


def warm_up_key(step: SpeculativeStep, key: GraphKey) -> None:
    """Run the step for one key, so that nothing is left to initialise in its capture; on padding rows only."""
    warm_up(lambda: step(key.batch, key.k))


def capture_key(step: SpeculativeStep, key: GraphKey, mode: Mode, pool: tuple[int, int] | None) -> Captured:
    """Capture the step for one key; changes no state.

    Args:
        step: the step.
        key: batch and k.
        mode: any but EAGER.
        pool: of CUDA graphs; None makes an FX graph.
    """
    if pool is None:
        traced = trace_step(step, key.batch, key.k)
        nodes = len(traced.nodes)
        return Captured(traced if mode is Mode.FULL else cut(traced, mode)[0], nodes, 0)
    before = torch.cuda.memory_reserved()
    with padding_only(step.state):
        if mode is Mode.FULL:
            graph = capture_call(lambda: step(key.batch, key.k), pool)
            nodes = count_nodes(graph)
        else:
            graph = CUDAPieces(*cut(trace_step(step, key.batch, key.k), mode), pool)
            nodes = None
    return Captured(graph, nodes, torch.cuda.memory_reserved() - before)
