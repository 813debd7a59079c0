"""Measured beside predicted, where there is a GPU."""

from statistics import median

import torch

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.modes import Mode
from stepgraph.capture.plan.plan import MODE_KEYS, Plan
from stepgraph.capture.replay_timer import place_everywhere, time_replays

REPLAYS = 30


def require_cuda() -> None:
    if not torch.cuda.is_available():
        raise ValueError("--measure was given; this machine or this build of torch has no CUDA")


def measure(plan: Plan, model: str, drafter: str, dtype: str, block_size: int, context: int) -> list[dict]:
    """Time every key of the plan in every mode, on random weights of the model's shapes.

    Requests have `context` tokens each, rejected drafts change nothing about the work of a step, and the state is put back
    before each replay.

    Returns:
        A row per key: batch, k, and the median microseconds of each mode under the plan's own names.
    """
    max_batch = max(key.batch for key in plan.keys)
    options = EngineOptions(
        model=f"random:{model.removeprefix('random:')}", drafter=drafter, k=max(key.k for key in plan.keys),
        max_batch=max_batch, max_len=context + 64, block_size=block_size, dtype=dtype, device="cuda",
        kv_memory_bytes=1 << 40,
    )  # fmt: skip
    engine = build_engine(options).engine
    step, keys = engine.graphs.step, KeySet(GraphKey(key.batch, key.k) for key in plan.keys)
    place_everywhere(step.state, context)
    rows = []
    for key in plan.keys:
        row: dict = {"batch": key.batch, "k": key.k}
        for mode in Mode:
            graphs = StepGraphs(step, keys, mode=mode)
            row[MODE_KEYS[mode]] = 1e3 * median(elapsed_ms for _, elapsed_ms in time_replays(graphs, [key], REPLAYS))
            graphs.destroy()
        rows.append(row)
    return rows
