"""Times of replays at a given context, the same work before every one."""

import time
from collections.abc import Iterable, Iterator, Sequence

import torch

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey
from stepgraph.capture.state import DecodeState

WARM_UP = 2
KEPT = ("seq_len", "finished", "last_token", "history")


def place_everywhere(state: DecodeState, context: int) -> None:
    """A running request of `context` tokens in each slot, each with blocks of its own."""
    blocks = state.block_table.shape[1]
    for slot in range(state.num_slots):
        state.block_table[slot] = torch.arange(blocks, device=state.slots.device) + 1 + slot * blocks
    state.seq_len[: state.num_slots] = context - 1
    state.finished[: state.num_slots] = 0
    state.limit[: state.num_slots] = state.max_len
    state.draft_limit[: state.num_slots] = state.k_max


def time_replays(graphs: StepGraphs, keys: Sequence[GraphKey], rounds: int) -> Iterator[tuple[GraphKey, float]]:
    """(key, milliseconds) of every key in every round, so that what slows a machine down slows all keys alike.

    The requests are those of `place_everywhere`; they are put back before each replay. The first rounds are not reported.
    """
    state = graphs.step.state
    kept = {name: getattr(state, name).clone() for name in KEPT}
    for number in range(WARM_UP + rounds):
        for key in keys:
            state.set_rows(list(range(key.batch)))
            for name, values in kept.items():
                getattr(state, name).copy_(values)
            elapsed_ms = _cuda_ms(graphs, key) if state.slots.is_cuda else _host_ms(graphs, key)
            if number >= WARM_UP:
                yield key, elapsed_ms


def _host_ms(graphs: StepGraphs, key: GraphKey) -> float:
    start_s = time.perf_counter()
    graphs.replay(key.batch, key.k)
    return (time.perf_counter() - start_s) * 1e3


def _cuda_ms(graphs: StepGraphs, key: GraphKey) -> float:
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graphs.replay(key.batch, key.k)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def quantiles(samples: Iterable[float]) -> dict[str, float]:
    """`{"p20", "p50", "p80"}` of some numbers."""
    values = torch.tensor(sorted(samples), dtype=torch.float64)
    return {f"p{q}": float(values.quantile(q / 100)) for q in (20, 50, 80)}
