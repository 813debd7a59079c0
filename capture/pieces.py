"""A step as several graphs with eager stretches between them: what serving engines capture, for an honest comparison.

PIECEWISE cuts the traced step at every attention op and at its sampling tail, which run eagerly. THREE_GRAPH has a graph for
each of draft, verify and observe, and an eager tail. The ops are those of the whole step, in the same order; FULL and EAGER
have no cuts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from stepgraph.capture.cuda import capture_call, warm_up
from stepgraph.capture.modes import Mode
from stepgraph.capture.phases import phase_of
from stepgraph.capture.trace import TracedStep
from stepgraph.kernels.registry import implementation

ATTENTION = torch.ops.stepgraph.uniform_decode_attention.default
TAIL = ("accept", "advance")


def runs_eagerly(node: Node, mode: Mode) -> bool:
    """Whether a node of the traced step is outside every graph in this mode."""
    if mode is Mode.PIECEWISE:
        return node.target is ATTENTION or phase_of(node) in TAIL
    return mode is Mode.EAGER or (mode is Mode.THREE_GRAPH and phase_of(node) in TAIL)


@dataclass(frozen=True)
class Piece:
    """Consecutive nodes that run the same way.

    Attributes:
        name: of the submodule in the cut graph.
        eager: operator by operator, not as a graph.
        nodes: ops in it.
    """

    name: str
    eager: bool
    nodes: int


def pieces_of(traced: TracedStep, mode: Mode) -> list[tuple[bool, list[Node]]]:
    """(eager, nodes) of each stretch of the step, in order. A graph ends where its phase does in THREE_GRAPH mode."""
    pieces: list[tuple[bool, list[Node]]] = []
    last = None
    for node in traced.nodes:
        eager = runs_eagerly(node, mode)
        kind = (eager, phase_of(node) if mode is Mode.THREE_GRAPH and not eager else None, eager and node.target is ATTENTION)
        if not pieces or kind != last or kind[2]:
            pieces.append((eager, []))
        pieces[-1][1].append(node)
        last = kind
    return pieces


def cut(traced: TracedStep, mode: Mode) -> tuple[TracedStep, list[Piece]]:
    """The same step with a submodule for each stretch, called in order."""
    pieces = pieces_of(traced, mode)
    number = {node: i for i, (_, nodes) in enumerate(pieces) for node in nodes}
    graph = split_module(traced.graph, None, number.__getitem__, keep_original_order=True)
    return replace(traced, graph=graph), [Piece(f"submod_{i}", eager, len(nodes)) for i, (eager, nodes) in enumerate(pieces)]


class CUDAPieces:
    """The pieces of a step on CUDA: each graph piece is a `torch.cuda.CUDAGraph`, everything else runs between them.

    All values that pass between pieces are at fixed addresses: those that graphs make are in the graphs' pool, and attention,
    the only eager op whose output a later graph reads, writes into a buffer of its own.
    """

    def __init__(self, step: TracedStep, pieces: list[Piece], pool: tuple[int, int]):
        self.calls: list[Callable[[], None]] = []
        self.kept: list = []  # graphs and the values that pass between them, at the addresses the graphs know
        eager = {piece.name: piece.eager for piece in pieces}
        with torch.no_grad():
            warm_up(step.replay)
            placeholders = iter(step.tensors)
            values: dict[Node, object] = {}
            for node in step.graph.graph.nodes:
                if node.op == "placeholder":
                    values[node] = next(placeholders)
                elif node.op == "call_module":
                    arguments = torch.fx.node.map_arg(node.args, values.__getitem__)
                    values[node] = self._add(getattr(step.graph, node.target), arguments, eager[node.target], pool)
                elif node.op == "call_function":  # an element of a piece's outputs
                    values[node] = node.target(*torch.fx.node.map_arg(node.args, values.__getitem__))
        self.kept.append(values)

    def replay(self) -> None:
        for call in self.calls:
            call()

    def _add(self, module: GraphModule, arguments: tuple, eager: bool, pool: tuple[int, int]):
        """Record a piece; returns its output values, with which later pieces are captured."""
        ops = [node for node in module.graph.nodes if node.op == "call_function"]
        if not eager:
            outputs = []
            graph = capture_call(lambda: outputs.append(module(*arguments)), pool)
            self.kept.append(graph)
            self.calls.append(graph.replay)
            return outputs[0]
        if len(ops) == 1 and ops[0].target is ATTENTION:
            inputs = dict(zip([node for node in module.graph.nodes if node.op == "placeholder"], arguments, strict=True))
            attend = implementation("uniform_decode_attention", "triton")
            args, kwargs = (torch.fx.node.map_arg(part, inputs.__getitem__) for part in (ops[0].args, ops[0].kwargs))
            out: Tensor = torch.empty_like(args[0])

            def call() -> None:
                attend(*args, **kwargs, out=out)

            call()
            self.calls.append(call)
            return out
        outputs = module(*arguments)
        kept = outputs if isinstance(outputs, tuple) else (outputs,)

        def call_and_copy() -> None:
            fresh = module(*arguments)
            for old, new in zip(kept, fresh if isinstance(fresh, tuple) else (fresh,), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

        self.calls.append(call_and_copy)
        return outputs
