"""The plan of a model on a GPU that need not be here: graphs, launches, bytes, roofline times, and modes compared."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

import torch

from stepgraph.capture.keys import GraphKey, KeySet, Padding, default_rungs
from stepgraph.capture.modes import Mode
from stepgraph.capture.phases import PHASES
from stepgraph.capture.plan.gpus import GPU
from stepgraph.capture.plan.launches import Launches
from stepgraph.capture.plan.overhead import Overhead
from stepgraph.capture.plan.shapes import StepShapes
from stepgraph.capture.plan.tally import Tally, extrapolate, tally
from stepgraph.capture.policies import KPolicy
from stepgraph.capture.trace import trace_step

MODE_KEYS = {Mode.FULL: "full_us", Mode.THREE_GRAPH: "three_graph_us", Mode.PIECEWISE: "piecewise_us", Mode.EAGER: "eager_us"}


@dataclass(frozen=True)
class PlannedKey:
    """One graph.

    Attributes:
        batch, k: its key.
        nodes: ops that launch something. launches: kernels.
        bytes, flops: least traffic with device memory, and arithmetic.
        time_us: roofline time, without any overhead; phases: phase → its part, in microseconds.
        modes: `full_us`, `three_graph_us`, `piecewise_us`, `eager_us`, under the overhead model.
        tokens: expected tokens a request emits in a step; tpot_us: `full_us / tokens`.
    """

    batch: int
    k: int
    nodes: int
    launches: int
    bytes: int
    flops: int
    time_us: float
    phases: dict[str, float]
    modes: dict[str, float]
    tokens: float
    tpot_us: float


@dataclass(frozen=True)
class Plan:
    """Everything `stepgraph plan` prints; `to_json` has the documented keys.

    Attributes:
        keys: a row per graph.
        padding: of the key set over what the policy can ask for.
        pool_bytes: intermediates of the largest graph, in which all graphs' memory is shared.
        weight_bytes, kv_bytes: beside it.
        rung_sets: name → (graphs, mean padding, worst padding) of other choices of buckets.
        kernels: compiled resources per kernel, None where they were not asked for.
        assumptions: what the figures hang on.
    """

    keys: list[PlannedKey]
    padding: Padding
    pool_bytes: int
    weight_bytes: int
    kv_bytes: int
    rung_sets: dict[str, tuple[int, float, float]]
    kernels: list[dict] = field(default_factory=list)
    assumptions: dict = field(default_factory=dict)

    def to_json(self) -> dict:
        return {
            "graphs": len(self.keys),
            "misses": len(self.padding.misses),
            "padding_mean": self.padding.mean,
            "padding_worst": self.padding.worst,
            "pool_bytes": self.pool_bytes,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "rung_sets": {
                name: {"graphs": graphs, "padding_mean": mean, "padding_worst": worst}
                for name, (graphs, mean, worst) in self.rung_sets.items()
            },
            "keys": [asdict(key) for key in self.keys],
            "kernels": self.kernels,
            "assumptions": self.assumptions,
        }


def make_plan(
    shapes: StepShapes,
    policy: KPolicy,
    gpu: GPU,
    *,
    context: int,
    acceptance: Sequence[float],
    overhead: Overhead,
    rungs: Sequence[int] | None = None,
    progress: Callable[[Iterable[GraphKey]], Iterable[GraphKey]] = iter,
) -> tuple[Plan, Launches]:
    """Trace every reachable key as if on the GPU and add up.

    Args:
        shapes: of the step.
        policy: whose keys to plan.
        gpu: to plan for.
        context: tokens in the cache of each request.
        acceptance: probability that draft i is accepted when those before it were; the last one stands for later drafts.
        overhead: of launches.
        rungs: bucket sizes, the default ones if None.

    Returns:
        The plan, without compiled kernels, and the launches that were met.
    """
    keys = policy.keys(shapes.max_batch, rungs)
    launches = Launches(gpu.arch)
    tallies = {key: _tally_of(shapes, key, context, gpu, launches) for key in progress(list(keys))}
    rows = [_row(key, tallies[key], acceptance, overhead) for key in keys]
    reach = policy.reachable(shapes.max_batch)
    assumptions = {
        "gpu": asdict(gpu),
        "context_tokens": context,
        "acceptance_by_position": list(acceptance),
        "dtype": str(shapes.dtype).removeprefix("torch."),
        "overhead_us": asdict(overhead),
        "times": "predicted, not measured: roofline of the least traffic and arithmetic at datasheet peaks",
        "launches": "exact for the project's kernels; one for each library op",
        "options": "no request asks for penalties, biases or log-probabilities",
        "depth": "extrapolated from shallow traces" if shapes.uniform else "traced in full",
    }
    plan = Plan(
        keys=rows,
        padding=keys.padding(reach, shapes.max_batch),
        pool_bytes=max(t.peak_bytes for t in tallies.values()),
        weight_bytes=shapes.weight_bytes(),
        kv_bytes=shapes.kv_bytes(),
        rung_sets=rung_sets(policy, shapes.max_batch),
        assumptions=assumptions,
    )
    return plan, launches


def rung_sets(policy: KPolicy, max_batch: int) -> dict[str, tuple[int, float, float]]:
    """Graphs and padding of several choices of buckets: what few graphs cost in padding, and the reverse."""
    powers = [1 << i for i in range(max_batch.bit_length()) if 1 << i <= max_batch]
    choices = {
        "default": default_rungs(max_batch),
        "powers of two": tuple(powers),
        "1, 2, 4, then by 8": (1, 2, 4, *range(8, max_batch + 1, 8)),
        "every size": tuple(range(1, max_batch + 1)),
    }
    reach = policy.reachable(max_batch)
    found = {}
    for name, rungs in choices.items():
        keys: KeySet = policy.keys(max_batch, rungs)
        padding = keys.padding(reach, max_batch)
        found[name] = (len(keys), padding.mean, padding.worst)
    return found


def expected_tokens(acceptance: Sequence[float], k: int) -> float:
    """1 + Σ_{i ≤ k} Π_{j ≤ i} a_j: tokens a step emits at k drafts (Leviathan et al. 2023, with a rate for each position)."""
    total = run = 1.0
    for position in range(k):
        run *= acceptance[min(position, len(acceptance) - 1)]
        total += run
    return total


def _tally_of(shapes: StepShapes, key: GraphKey, context: int, gpu: GPU, launches: Launches) -> Tally:
    def of(layers: dict[str, int] | None) -> Tally:
        with torch.no_grad():
            return tally(trace_step(shapes.step(layers), key.batch, key.k, "cuda"), context, gpu, launches)

    # The target keeps one layer more than the drafter's share of it, so that either can grow alone.
    shallow = {kind: 2 if kind == "target" and "early-exit" in shapes.layers else 1 for kind in shapes.layers}
    if not shapes.uniform or any(shapes.layers[kind] <= count for kind, count in shallow.items()):
        return of(None)
    deeper = []
    for kind, count in shallow.items():
        more = shallow | {kind: count + 1}
        deeper.append((of(more), shapes.layers[kind] - count))
    return extrapolate(of(shallow), deeper)


def _row(key: GraphKey, found: Tally, acceptance: Sequence[float], overhead: Overhead) -> PlannedKey:
    sums, tokens = found.sums, expected_tokens(acceptance, key.k)
    modes = {MODE_KEYS[mode]: overhead.mode_us(sums, mode) for mode in Mode}
    return PlannedKey(
        batch=key.batch,
        k=key.k,
        nodes=round(sums["nodes"]),
        launches=round(sums["launches"]),
        bytes=round(sums["bytes"]),
        flops=round(sums["flops"]),
        time_us=sums["time_us"],
        phases={name: sums[f"time_us/{name}"] for name in PHASES},
        modes=modes,
        tokens=tokens,
        tpot_us=modes["full_us"] / tokens,
    )
