"""Time per step that is not the replay: what the host does between two launches.

The engine runs as ever, with a graph that only says what a step would have said: each live row committed k + 1 tokens. Policy,
block growth, input writes, result ring and statistics are the engine's own. Steps in which a request came or went are timed
apart: they write a slot, clear one, and hand out an answer.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
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
from stepgraph.model.checkpoint import LoadedModel
from stepgraph.model.presets import preset
from stepgraph.model.transformer import Transformer

BATCHES = (1, 2, 4, 8, 16, 32, 64)
PRESET = "tiny-llama"
MAX_LEN = 1024


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
    # No step is computed, so that the small model may have as many positions as are needed.
    target = Transformer(replace(preset(PRESET), max_position=max_len)).randomize(0).eval()
    options = EngineOptions(f"random:{PRESET}", "ngram" if k else "none", k=k, max_batch=batch, max_len=max_len)
    engine = build_engine(options, LoadedModel(target, None, PRESET, 0.0)).engine
    graphs = engine.graphs
    steps = [NoStep(graphs.step.state, key) for key in graphs.keys]
    graphs.captures |= {step.key: Captured(step, None, 0) for step in steps}
    graphs.step.prefill = lambda slot, tokens, start: None
    return engine, steps


def host_row(batch: int, k: int, steps: int, warm_up: int = 20) -> dict:
    """Microseconds per step of the host at a steady batch, requests that end being replaced at once: of the steps between
    (`p20_us`, `p50_us`, `p80_us`), of those in which requests come or go (`turnover_p50_us`, None when there are none), and
    the mean of all.

    `growth` is the median of the last tenth of the steps over that of the first.
    """
    engine, graphs = engine_without_steps(batch, k)
    params = SamplingParams(max_new_tokens=MAX_LEN, ignore_eos=True)
    times_us: list[float] = []
    between: list[float] = []
    turnover: list[float] = []
    # Requests end at different times from the start, as they do in a batch that has run for long.
    first = iter(range(1, batch + 1))
    for number in range(warm_up + batch + steps):
        while engine.unfinished < batch:
            left = MAX_LEN * next(first, batch) // batch
            engine.add([1, 2, 3], replace(params, max_new_tokens=max(left, 2 * (k + 1))))
        changes = bool(engine.scheduler.waiting or engine.scheduler.prefilling)
        before_s, ended = sum(graph.spent_s for graph in graphs), engine.stats.requests
        start_s = time.perf_counter()
        engine.step()
        total_s = time.perf_counter() - start_s
        if number >= warm_up + batch:
            time_us = (total_s - sum(graph.spent_s for graph in graphs) + before_s) * 1e6
            times_us.append(time_us)
            (turnover if changes or engine.stats.requests > ended else between).append(time_us)
    tenth = max(1, steps // 10)
    ranked = sorted(between or times_us)
    return {
        "batch": batch, "k": k, "steps": steps, "requests": engine.stats.requests, "p50_us": round(median(ranked), 1),
        "p20_us": round(ranked[len(ranked) // 5], 1), "p80_us": round(ranked[len(ranked) * 4 // 5], 1),
        "turnover_steps": len(turnover), "turnover_p50_us": round(median(turnover), 1) if turnover else None,
        "mean_us": round(sum(times_us) / len(times_us), 1),
        "growth": round(median(times_us[-tenth:]) / median(times_us[:tenth]), 3),
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
        print("batch   k   p20 us   p50 us   p80 us  turnover  p50 us  mean us  growth")
    for row in rows(tuple(args.batches), args.k, args.steps):
        if args.json:
            print(json.dumps(row))
        else:
            between = "".join(f"{row[name]:9.1f}" for name in ("p20_us", "p50_us", "p80_us"))
            turnover = "-" if row["turnover_p50_us"] is None else f"{row['turnover_p50_us']:.1f}"
            share = f"{100 * row['turnover_steps'] / row['steps']:8.0f} %{turnover:>8s}"
            print(f"{row['batch']:5d} {row['k']:3d}{between}{share}{row['mean_us']:9.1f}{row['growth']:8.2f}")
        sys.stdout.flush()
    return 0
