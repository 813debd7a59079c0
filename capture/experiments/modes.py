"""FULL, THREE_GRAPH, PIECEWISE and EAGER side by side: the same step, timed in turns in one process.

Weights are random and acceptance is synthetic: times of a step do not depend on either. TPOT is the time of a step over the
tokens that the stated acceptance would give it.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from stepgraph.capture.build import EngineOptions, build_engine, load_target
from stepgraph.capture.experiments.results import Table
from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.modes import Mode
from stepgraph.capture.pieces import pieces_of
from stepgraph.capture.plan.plan import expected_tokens
from stepgraph.capture.replay_timer import place_everywhere, quantiles, time_replays
from stepgraph.capture.trace import trace_step
from stepgraph.model.checkpoint import LoadedModel

# Acceptance by position of an EAGLE-3 head of an 8B-class model, assumed where nothing real is drafted.
ACCEPTANCE = (0.75, 0.7, 0.65, 0.6, 0.55)
LABEL = "random weights, synthetic acceptance"
CHAIN = 20  # replays between two synchronisations


def random_options(model: str, drafter: str, k: int, batch: int, context: int) -> EngineOptions:
    """Options of an engine for a preset with random weights: bfloat16 on CUDA, float32 elsewhere."""
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return EngineOptions(
        f"random:{model}", drafter, k=k, max_batch=batch, max_len=context + 16 + k, dtype=dtype, kv_memory_bytes=1 << 50
    )


def random_target(model: str) -> LoadedModel:
    return load_target(random_options(model, "none", 0, 1, 16))


def mode_rows(
    loaded: LoadedModel, model: str, drafter: str, batches: Sequence[int], ks: Sequence[int], context: int, rounds: int
) -> Iterator[dict]:
    """A row for each batch, k and mode, the modes interleaved: device and host time of a step, and a chain's.

    `host_calls` is what the host calls in a step: a graph is one call, an op outside of graphs another.
    """
    options = random_options(model, drafter, max(ks), max(batches), context)
    step = build_engine(options, loaded).engine.graphs.step
    place_everywhere(step.state, context)
    for batch in batches:
        for k in ks:
            key = GraphKey(batch, k)
            graphs = {mode: StepGraphs(step, KeySet([key]), mode=mode) for mode in Mode}
            device_ms, chain_ms, launch_ms = defaultdict(list), defaultdict(list), defaultdict(list)
            for graph in graphs.values():
                graph.capture()
            for _ in range(rounds):
                for mode, graph in graphs.items():
                    device_ms[mode] += [elapsed for _, elapsed in time_replays(graph, [key], 1)]
                    whole, launch = _chain(graph, key, context)
                    chain_ms[mode].append(whole)
                    launch_ms[mode].append(launch)
            traced, tokens = trace_step(step, batch, k), expected_tokens(ACCEPTANCE, k)
            for mode, graph in graphs.items():
                captured = graph.rows()
                step_ms = quantiles(chain_ms[mode])
                yield {
                    "model": model, "drafter": drafter, "label": LABEL, "context": context, "batch": batch, "k": k,
                    "mode": str(mode), "repeats": rounds, "step_ms": step_ms, "device_ms": quantiles(device_ms[mode]),
                    "host_ms": quantiles(launch_ms[mode]), "expected_tokens": tokens, "tpot_ms": step_ms["p50"] / tokens,
                    "host_calls": sum(len(nodes) if eager else 1 for eager, nodes in pieces_of(traced, mode)),
                    "eager_reason": graph.eager_reason, "nodes": captured[0]["nodes"] if captured else None,
                }  # fmt: skip
                graph.destroy()


def _chain(graphs: StepGraphs, key: GraphKey, context: int) -> tuple[float, float]:
    """(milliseconds a step of a chain, milliseconds of host time a step until the last is launched)."""
    state = graphs.step.state
    state.set_rows(list(range(key.batch)))
    start_s = time.perf_counter()
    for _ in range(CHAIN):
        state.seq_len[: state.num_slots] = context - 1  # a chain may not run out of room
        graphs.replay(key.batch, key.k)
    launched_s = time.perf_counter()
    if state.slots.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start_s) * 1e3 / CHAIN, (launched_s - start_s) * 1e3 / CHAIN


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """On a GPU the 8B-class shape of the published comparison; on a CPU a model that hides no host time, and the embedded
    one's shape.
    """
    if quick:
        sizes = [("tiny-llama", [2], [1], 32, 2)]
    elif torch.cuda.is_available():
        sizes = [("llama-3.1-8b", [1, 4, 16, 64], [0, 1, 3, 5], 2048, 7), ("qwen3-0.6b", [1, 16], [3], 2048, 7)]
    else:
        sizes = [("tiny-llama", [1, 4, 16], [0, 1, 3, 5], 128, 21), ("smollm2-135m", [1], [0, 3], 128, 5)]
    for model, *rest in sizes:
        yield from mode_rows(random_target(model), model, "eagle3:random", *rest)


def table(rows: list[dict]) -> Table:
    """A line for each model, batch and k, the modes beside one another."""
    by_key: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        by_key.setdefault((row["model"], row["batch"], row["k"]), {})[row["mode"]] = row
    lines = []
    for (model, batch, k), modes in by_key.items():
        if Mode.FULL in modes:
            times = [modes[mode]["step_ms"] if mode in modes else None for mode in Mode]
            cells = [f"{t['p50']:.2f} ({t['p20']:.2f} to {t['p80']:.2f})" if t else "" for t in times]
            calls = [str(modes[mode]["host_calls"]) if mode in modes else "?" for mode in Mode]
            lines.append([model, str(batch), str(k), *cells, f"{modes[Mode.FULL]['tpot_ms']:.2f}", " / ".join(calls)])
    header = ["model", "batch", "k", *(f"{mode}, ms a step" for mode in Mode), "TPOT of FULL, ms", "host calls a step"]
    labels = sorted({f"{row['label']}, {row['drafter']}, context {row['context']}" for row in rows})
    note = "Median (p20 to p80) of chains of steps, modes in turns. Host calls in the order of the columns. "
    return Table(header, lines, note + "; ".join(labels) + ".")


def headlines(rows: list[dict]) -> list[tuple[str, str]]:
    """Time of a step in each mode over that in FULL, at the smallest batch and largest k of each model."""
    told = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        place = min((row["batch"], -row["k"]) for row in of_model)
        step_ms = {row["mode"]: row["step_ms"]["p50"] for row in of_model if (row["batch"], -row["k"]) == place}
        if Mode.FULL in step_ms:
            ratios = ", ".join(f"{mode} {ms / step_ms[Mode.FULL]:.2f}" for mode, ms in step_ms.items() if mode != Mode.FULL)
            told.append((f"time of a step over FULL, {model}, batch {place[0]}, k = {-place[1]}", ratios))
    return told
