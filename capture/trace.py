"""Turn a step into an FX graph without running it: the captured graph of a machine that has no CUDA graphs."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from stepgraph.capture.step import SpeculativeStep


@dataclass(frozen=True)
class TracedStep:
    """A step's graph, and the tensors it reads and writes, in the order of its inputs.

    `names[i]` is the dotted name of `tensors[i]` in the step (for example `state.seq_len`).
    """

    graph: GraphModule
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]

    def replay(self) -> None:
        self.graph.forward(*self.tensors)


def step_tensors(step: SpeculativeStep) -> dict[str, Tensor]:
    """Every tensor that a step can touch, by name; shared tensors once."""
    return dict(step.named_parameters()) | dict(step.named_buffers())


def trace_step(step: SpeculativeStep, batch: int, k: int) -> TracedStep:
    """Trace the step for one graph key on fake tensors: no kernel runs and no state changes.

    Raises:
        Exception: whatever a host read, a data-dependent shape or a tensor unknown to the step raises under FakeTensorMode.
    """
    tensors = step_tensors(step)
    names = tuple(tensors)

    def whole_step(*inputs: Tensor) -> None:
        functional_call(step, dict(zip(names, inputs, strict=True)), (batch, k))

    # A FakeTensorMode of our own, without a shape environment: there a host read has no value to give, and raises.
    fake_mode = FakeTensorMode()
    with torch.no_grad(), fake_mode:
        graph = make_fx(whole_step)(*(fake_mode.from_tensor(tensor) for tensor in tensors.values()))
    return TracedStep(graph, names, tuple(tensors.values()))
