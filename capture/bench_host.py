"""Time per step that is not the replay: what the host does between two launches.

The engine runs as ever, with a graph that only says what a step would have said: each live row committed k + 1 tokens. Policy,
block growth, input writes, result ring and statistics are the engine's own.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from statistics import median

import torch

from stepgraph.capture.backends import Captured
from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.engine import Engine
from stepgraph.capture.keys import GraphKey
from stepgraph.capture.request import SamplingParams
from stepgraph.capture.schedule import require_int
from stepgraph.capture.state import DecodeState
from stepgraph.kernels.advance import LENGTH, RESULT_HEAD, RUNNING

BATCHES = (1, 2, 4, 8, 16, 32, 64)
MODEL = "random:tiny-llama"
MAX_LEN = 256


class NoStep:
    """A graph that does no work of a step. It writes the results that the host will read: k + 1 tokens a row, up to its limit.

    `spent_s` is the time in it, which is not the host's.
    """

    def __init__(self, state: DecodeState, key: GraphKey):
        self.state, self.key, self.spent_s = state, key, 0.0
        self.head = torch.zeros(key.batch, RESULT_HEAD, dtype=torch.int64)

    def replay(self) -> None:
        start_s = time.perf_counter()
        state, new = self.state, self.key.query_len
        slots = state.slots[: self.key.batch]
        slots = torch.where(slots < 0, state.num_slots, slots)
        room = state.limit[slots] - 1 - state.seq_len[slots]
        count = room.clamp(max=new)
        state.seq_len[slots] += count
        self.head[:, 0], self.head[:, 1] = state.seq_len[slots], torch.where(count == room, LENGTH, RUNNING)
        state.results[: self.key.batch, :RESULT_HEAD] = self.head
        tokens = torch.where(torch.arange(new) < count[:, None], 1, -1)
        state.results[: self.key.batch, RESULT_HEAD : RESULT_HEAD + new] = tokens
        self.spent_s += time.perf_counter() - start_s


def engine_without_steps(batch: int, k: int, max_len: int = MAX_LEN) -> tuple[Engine, list[NoStep]]:
    """An engine for `batch` requests whose graphs and prompts cost nothing, and its graphs."""
    options = EngineOptions(MODEL, "ngram" if k else "none", k=k, max_batch=batch, max_len=max_len)
    engine = build_engine(options).engine
    graphs = engine.graphs
    steps = [NoStep(graphs.step.state, key) for key in graphs.keys]
    graphs.captures |= {step.key: Captured(step, None, 0) for step in steps}
    graphs.step.prefill = lambda slot, tokens, start: None
    return engine, steps


def host_row(batch: int, k: int, steps: int, warm_up: int = 20) -> dict:
    """Microseconds per step of the host at a steady batch; requests that end are replaced at once, and that counts too.

    `growth` is the mean of the last tenth of the steps over that of the first.
    """
    engine, graphs = engine_without_steps(batch, k)
    params = SamplingParams(max_new_tokens=MAX_LEN, ignore_eos=True)
    times_us: list[float] = []
    for number in range(warm_up + steps):
        while engine.unfinished < batch:
            engine.add([1, 2, 3], params)
        before_s = sum(graph.spent_s for graph in graphs)
        start_s = time.perf_counter()
        engine.step()
        total_s = time.perf_counter() - start_s
        if number >= warm_up:
            times_us.append((total_s - sum(graph.spent_s for graph in graphs) + before_s) * 1e6)
    tenth = max(1, steps // 10)
    ranked = sorted(times_us)
    return {
        "batch": batch, "k": k, "steps": steps, "requests": engine.stats.requests, "p50_us": round(median(ranked), 1),
        "p20_us": round(ranked[len(ranked) // 5], 1), "p80_us": round(ranked[len(ranked) * 4 // 5], 1),
        "mean_us": round(sum(ranked) / len(ranked), 1),
        "growth": round(sum(times_us[-tenth:]) / sum(times_us[:tenth]), 3),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }  # fmt: skip


def rows(batches: tuple[int, ...], k: int, steps: int) -> Iterator[dict]:
    for batch in batches:
        yield host_row(batch, k, steps)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), metavar="N")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000, help="steps of each batch")
    parser.add_argument("--json", action="store_true", help="a row on a line, as JSON")


def run(args: argparse.Namespace) -> int:
    require_int("--steps", args.steps, 1)
    for batch in args.batches:
        require_int("--batches", batch, 1, 4096)
    require_int("--k", args.k, 0)
    if not args.json:
        print("batch   k   p20 us   p50 us   p80 us  mean us  growth")
    for row in rows(tuple(args.batches), args.k, args.steps):
        if args.json:
            print(json.dumps(row))
        else:
            figures = (row["p20_us"], row["p50_us"], row["p80_us"], row["mean_us"])
            print(f"{row['batch']:5d} {row['k']:3d}" + "".join(f"{x:9.1f}" for x in figures) + f"{row['growth']:8.2f}")
        sys.stdout.flush()
    return 0
