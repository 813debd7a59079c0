"""Sums over the nodes of a traced step, and the same sums for a deeper model.

Layers of one window are alike, node by node, so every sum is affine in the numbers of layers. Two or three traces of shallow
models give the coefficients, and a plan for 32 layers costs no more than one for two.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from stepgraph.capture.modes import Mode
from stepgraph.capture.phases import PHASES, phase_of
from stepgraph.capture.pieces import pieces_of
from stepgraph.capture.plan.costs import cost_of, is_view, size_bytes
from stepgraph.capture.plan.gpus import GPU
from stepgraph.capture.plan.launches import Launches
from stepgraph.capture.trace import TracedStep


@dataclass(frozen=True)
class Tally:
    """Of one step.

    Attributes:
        sums: name → sum over nodes: `nodes`, `launches`, `bytes`, `flops`, `time_us` (roofline), `time_us/PHASE`, and for each
            mode `graphs/MODE` (graph launches) and `eager/MODE` (ops launched one by one).
        peak_bytes: most bytes of intermediate values alive at once, which is what a graph's pool has to hold.
    """

    sums: Mapping[str, float]
    peak_bytes: int


def tally(traced: TracedStep, context: int, gpu: GPU, launches: Launches) -> Tally:
    """Sums of a step traced as if on CUDA, whose requests have `context` tokens in the cache."""
    sums: dict[str, float] = defaultdict(float)
    sums |= {f"time_us/{name}": 0.0 for name in PHASES}
    for node in traced.nodes:
        count = launches.count(node)
        if count == 0:
            continue
        cost = cost_of(node, context)
        compute_s = cost.flops / (gpu.flops_32 if cost.dtype is None else gpu.flops_per_s(cost.dtype))
        time_us = 1e6 * max(cost.nbytes / gpu.bandwidth_bytes_per_s, compute_s)
        sums["nodes"] += 1
        sums["launches"] += count
        sums["bytes"] += cost.nbytes
        sums["flops"] += cost.flops
        sums["time_us"] += time_us
        sums[f"time_us/{phase_of(node)}"] += time_us
    for mode in Mode:
        graphs = eager = 0
        for is_eager, nodes in pieces_of(traced, mode):
            launched = [node for node in nodes if not is_view(node)]
            if is_eager:
                eager += sum(launches.count(node) for node in launched)
            else:
                graphs += bool(launched)
        sums[f"graphs/{mode}"], sums[f"eager/{mode}"] = float(graphs), float(eager)
    return Tally(dict(sums), peak_bytes(traced.nodes))


def peak_bytes(nodes: list[Node]) -> int:
    """Most bytes of values that nodes made and later nodes still read."""
    last_use: dict[Node, int] = {}
    origin: dict[Node, Node] = {}  # a view keeps alive what it views
    for index, node in enumerate(nodes):
        inputs = [origin.get(source, source) for source in node.all_input_nodes]
        if is_view(node) and inputs:
            origin[node] = inputs[0]
        for source in [*inputs, origin.get(node, node)]:
            last_use[source] = index
    ending: dict[int, int] = defaultdict(int)
    alive = peak = 0
    for index, node in enumerate(nodes):
        if node not in origin:
            made = size_bytes(*[leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)])
            alive += made
            ending[last_use[node]] += made
        peak = max(peak, alive)
        alive -= ending[index]
    return peak


def extrapolate(base: Tally, steps: list[tuple[Tally, int]]) -> Tally:
    """The tally of a deeper model.

    Args:
        base: of the shallow one.
        steps: for each kind of layer, the tally with one more of them, and how many more the deep model has.
    """
    sums = dict(base.sums)
    for deeper, more in steps:
        for name, value in deeper.sums.items():
            sums[name] += more * (value - base.sums[name])
    return Tally(sums, max(t.peak_bytes for t in (base, *(deeper for deeper, _ in steps))))
