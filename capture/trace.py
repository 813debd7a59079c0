"""Turn a step into an FX graph without running it: the captured graph of a machine that has no CUDA graphs, and the contract
that a machine with them will hold the step to.
"""

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils._python_dispatch import _get_current_dispatch_mode

from stepgraph.capture.contract import CaptureContract, keeps_no_tensor
from stepgraph.capture.guards import GuardFree
from stepgraph.capture.phases import named_range, phase_of
from stepgraph.capture.step import SpeculativeStep
from stepgraph.kernels.registry import implementation_on_cpu, is_overridden

# Views as methods: the way through the registry of operators is most of what a view takes.
METHODS = {torch.ops.aten.view.default: Tensor.view, torch.ops.aten.unbind.int: Tensor.unbind}


@dataclass(frozen=True)
class TracedStep:
    """A step's graph, and the tensors it reads and writes, in the order of its inputs.

    `names[i]` is the dotted name of `tensors[i]` in the step (for example `state.seq_len`). Each node has its phase (see
    `stepgraph.capture.phases.phase_of`) and, in `meta["val"]`, its output's shape and dtype.
    """

    graph: GraphModule
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    def replay(self) -> None:
        # Who overrides implementations or watches operators has to meet the operators themselves.
        by_name = is_overridden() or _get_current_dispatch_mode() is not None
        (self.graph if by_name else self.bound).forward(*self.tensors)

    @cached_property
    def bound(self) -> GraphModule:
        """On the CPU the graph with each op of the project replaced by the function that the dispatcher would find for it, and
        views by methods: the way there takes longer than many a small op. Elsewhere the graph itself.
        """
        return _bind(self.graph) if all(tensor.device.type == "cpu" for tensor in self.tensors) else self.graph

    def replay_in_ranges(self) -> None:
        """The same step, node by node, with a profiler range around each phase."""
        with _PhaseInterpreter(self.graph) as interpreter:
            interpreter.run(*self.tensors)

    @property
    def nodes(self) -> list[Node]:
        """The ops of the step, in order."""
        return [node for node in self.graph.graph.nodes if node.op == "call_function"]


def step_tensors(step: SpeculativeStep) -> dict[str, Tensor]:
    """Every tensor that a step can touch, by name; shared tensors once."""
    return dict(step.named_parameters()) | dict(step.named_buffers())


def trace_step(step: SpeculativeStep, batch: int, k: int, device: str | None = None) -> TracedStep:
    """Trace the step for one graph key on fake tensors: no kernel runs and no state changes.

    Args:
        step: the step; its tensors may live on the "meta" device when `device` is given.
        batch, k: the key.
        device: trace as if the step lived there, for example "cuda" on a machine without one; None is where it lives.

    Raises:
        CaptureContractError: the step does what a graph cannot hold (`stepgraph.capture.contract`).
    """
    tensors = step_tensors(step)
    names = tuple(tensors)
    lives_on = torch.device(device) if device is not None else step.state.slots.device

    def whole_step(*inputs: Tensor) -> None:
        with GuardFree(), CaptureContract(lives_on):
            functional_call(step, dict(zip(names, inputs, strict=True)), (batch, k))

    # A FakeTensorMode of our own, without a shape environment: there a host read has no value to give, and raises.
    with torch.no_grad(), FakeTensorMode(), preserve_node_meta(), keeps_no_tensor(step):
        fakes = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=lives_on) for t in tensors.values()]
        graph = make_fx(whole_step)(*fakes)
    return TracedStep(graph, names, tuple(tensors.values()))


def _bind(graph: GraphModule) -> GraphModule:
    bound = GraphModule(graph, deepcopy(graph.graph))
    for node in bound.graph.nodes:
        if node.op == "call_function":
            node.target = implementation_on_cpu(node.target) or METHODS.get(node.target, node.target)
        elif node.op == "call_module":  # a piece of a step that was cut
            setattr(bound, node.target, _bind(getattr(graph, node.target)))
    bound.recompile()
    return bound


class _PhaseInterpreter(Interpreter):
    """Runs a traced step node by node, with a range open for the phase it is in."""

    def __enter__(self):
        self.phase, self.open = None, ExitStack()
        return self

    def __exit__(self, *error):
        self.open.close()

    def run_node(self, node: Node):
        if node.op == "call_function" and phase_of(node) != self.phase:
            self.open.close()
            self.phase = phase_of(node)
            self.open.enter_context(named_range(self.phase))
        return super().run_node(node)
