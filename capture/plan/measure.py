"""Measured beside predicted, where there is a GPU."""

from statistics import median

import torch

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.modes import Mode
from stepgraph.capture.plan.plan import MODE_KEYS, Plan

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
    place_everywhere(step.state, context, block_size)
    rows = []
    for key in plan.keys:
        row: dict = {"batch": key.batch, "k": key.k}
        for mode in Mode:
            graphs = StepGraphs(step, keys, mode=mode)
            row[MODE_KEYS[mode]] = _time_us(graphs, key.batch, key.k)
            graphs.destroy()
        rows.append(row)
    return rows


def place_everywhere(state, context: int, block_size: int) -> None:
    """A running request of `context` tokens in each slot, each with blocks of its own."""
    blocks = state.block_table.shape[1]
    for slot in range(state.num_slots):
        state.block_table[slot] = torch.arange(blocks, device=state.slots.device) + 1 + slot * blocks
    state.seq_len[: state.num_slots] = context - 1
    state.limit[: state.num_slots] = state.max_len
    state.draft_limit[: state.num_slots] = state.k_max


def _time_us(graphs: StepGraphs, batch: int, k: int) -> float:
    state = graphs.step.state
    state.set_rows(list(range(batch)))
    kept = {name: getattr(state, name).clone() for name in ("seq_len", "finished")}
    samples = []
    for sample in range(REPLAYS + 3):
        for name, values in kept.items():
            getattr(state, name).copy_(values)
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graphs.replay(batch, k)
        end.record()
        end.synchronize()
        if sample >= 3:
            samples.append(start.elapsed_time(end) * 1e3)
    return median(samples)
