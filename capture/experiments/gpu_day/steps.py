"""Whole steps: the four modes side by side, what captures take, and step times over batches for the dynamic schedule.

Weights are random and acceptance is synthetic: times of a step do not depend on either. TPOT is the time of a step over the
tokens that the stated acceptance would give it.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from stepgraph.capture.build import EngineOptions, build_engine, load_target
from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.modes import Mode
from stepgraph.capture.plan.plan import expected_tokens
from stepgraph.capture.profile.measure import best_schedule, measure_costs
from stepgraph.capture.replay_timer import place_everywhere, quantiles, time_replays
from stepgraph.model.checkpoint import LoadedModel

# Acceptance by position of an EAGLE-3 head of an 8B-class model, assumed where nothing real is drafted.
ACCEPTANCE = (0.75, 0.7, 0.65, 0.6, 0.55)
LABEL = "random weights, synthetic acceptance"
CHAIN = 20  # replays between two synchronisations


def _options(model: str, drafter: str, k: int, batch: int, context: int) -> EngineOptions:
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return EngineOptions(
        f"random:{model}", drafter, k=k, max_batch=batch, max_len=context + 16 + k, dtype=dtype, kv_memory_bytes=1 << 50
    )


def _loaded(model: str) -> LoadedModel:
    return load_target(_options(model, "none", 0, 1, 16))


def expected(k: int) -> float:
    """Tokens of a step under `ACCEPTANCE`."""
    return expected_tokens(ACCEPTANCE, k)


def mode_rows(
    loaded: LoadedModel, model: str, drafter: str, batches: Sequence[int], ks: Sequence[int], context: int, rounds: int
) -> Iterator[dict]:
    """A row for each batch, k and mode, the modes interleaved: device and host time of a step, and a chain's."""
    options = _options(model, drafter, max(ks), max(batches), context)
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
            for mode, graph in graphs.items():
                captured = graph.rows()
                step_ms = quantiles(chain_ms[mode])
                yield {
                    "model": model, "drafter": drafter, "label": LABEL, "context": context, "batch": batch, "k": k,
                    "mode": str(mode), "repeats": rounds, "step_ms": step_ms, "device_ms": quantiles(device_ms[mode]),
                    "host_ms": quantiles(launch_ms[mode]), "expected_tokens": expected(k),
                    "tpot_ms": step_ms["p50"] / expected(k), "eager_reason": graph.eager_reason,
                    "nodes": captured[0]["nodes"] if captured else None,
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


def measure_modes(quick: bool, seed: int) -> Iterator[dict]:
    """FULL, THREE_GRAPH, PIECEWISE and EAGER."""
    if quick:
        yield from mode_rows(_loaded("tiny-llama"), "tiny-llama", "eagle3:random", [2], [1], 32, 2)
        return
    yield from mode_rows(_loaded("llama-3.1-8b"), "llama-3.1-8b", "eagle3:random", [1, 4, 16, 64], [0, 1, 3, 5], 2048, 7)
    yield from mode_rows(_loaded("qwen3-0.6b"), "qwen3-0.6b", "eagle3:random", [1, 16], [3], 2048, 7)


def measure_captures(quick: bool, seed: int) -> Iterator[dict]:
    """What each key of a schedule takes to capture, and the pool that all share."""
    schedule = [[1, 8, 3], [9, 16, 1]] if quick else [[1, 16, 5], [17, 32, 4], [33, 64, 3], [65, 128, 1], [129, 256, 0]]
    models = ("tiny-llama",) if quick else ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
    for model in models:
        options = _options(model, "eagle3:random", 5, schedule[-1][1], 64 if quick else 1024)
        options = EngineOptions(**{**vars(options), "k": None, "schedule": schedule})
        before = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        engine = build_engine(options).engine
        built = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        engine.graphs.capture()
        after = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        for row in engine.graphs.rows():
            yield {"model": model, "what": "key", **row}
        report = engine.graphs.report()
        yield {
            "model": model, "what": "all keys", "graphs": report["captures"], "capture_s": report["capture_s"],
            "reserved_by_engine_bytes": built - before, "reserved_by_graphs_bytes": after - built,
        }  # fmt: skip
        engine.graphs.destroy()
        del engine


def measure_schedule(quick: bool, seed: int) -> Iterator[dict]:
    """T(batch, k) of an 8B-class model, and the throughput of each fixed k and of the schedule that follows."""
    model = "tiny-llama" if quick else "llama-3.1-8b"
    batches, ks = ([1, 2], [0, 2]) if quick else ([1, 2, 4, 8, 16, 32, 64, 128, 192, 256], [0, 1, 2, 3, 4, 5])
    context, loaded = 32 if quick else 1024, _loaded(model)
    options = _options(model, "eagle3:random", max(ks), max(batches), context)
    rows = measure_costs(options, loaded, batches, ks, [context], 2 if quick else 9)
    for row in rows:
        yield {"what": "step", "model": model, **row}
    cost = CostTable(rows)
    schedule = best_schedule(cost, ACCEPTANCE, max(batches), context)
    yield {"what": "schedule", "model": model, "schedule": schedule, "acceptance": ACCEPTANCE, "label": LABEL}
    for batch in batches:
        chosen = next(k for first, last, k in schedule if first <= batch <= last)
        for name, k in (*((f"fixed:{k}", k) for k in ks), ("schedule", chosen)):
            step_ms = cost.step_ms(batch, k, context)
            yield {
                "what": "throughput", "model": model, "label": LABEL, "batch": batch, "policy": name, "k": k,
                "tokens_per_s": batch * expected(k) / step_ms * 1e3, "tpot_ms": step_ms / expected(k),
            }  # fmt: skip
