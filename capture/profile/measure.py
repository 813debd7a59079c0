"""Step times by batch, k and context, and acceptance by position, from the engine itself."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median

import torch

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.plan.plan import expected_tokens
from stepgraph.capture.prompts import encode_prompt
from stepgraph.capture.replay_timer import place_everywhere, quantiles, time_replays
from stepgraph.capture.request import SamplingParams
from stepgraph.model.checkpoint import LoadedModel

Progress = Callable[[Iterable, int], Iterable]


def measure_costs(
    options: EngineOptions,
    loaded: LoadedModel,
    batches: Sequence[int],
    ks: Sequence[int],
    contexts: Sequence[int],
    rounds: int,
    progress: Progress = lambda items, total: items,
) -> list[dict]:
    """Rows of a cost table, with spread: `{"batch", "k", "context", "step_ms", "p20_ms", "p80_ms", "replays"}`.

    Every k runs in a graph of its own for every batch; one round replays all of them, and the median of the rounds counts.

    Args:
        options: model, drafter and the like; sizes are set here.
        loaded: the target.
        batches, ks, contexts: what to measure.
        rounds: replays of each.
        progress: wraps (replays, how many) in a bar.
    """
    keys = [GraphKey(batch, k) for batch in batches for k in ks]
    options = replace(
        options, k=max(ks), schedule=None, policy=None, policy_options=None, max_batch=max(batches),
        max_len=max(contexts) + max(ks) + 2, kv_memory_bytes=1 << 50,
    )  # fmt: skip
    step = build_engine(options, loaded).engine.graphs.step
    graphs = StepGraphs(step, KeySet(keys), mode=options.mode)
    graphs.capture()
    samples: dict[tuple[GraphKey, int], list[float]] = defaultdict(list)

    def replays():
        for context in contexts:
            place_everywhere(step.state, context)
            for key, elapsed_ms in time_replays(graphs, keys, rounds):
                yield key, context, elapsed_ms

    for key, context, elapsed_ms in progress(replays(), len(keys) * len(contexts) * rounds):
        samples[key, context].append(elapsed_ms)
    rows = []
    for (key, context), times in samples.items():
        spread = quantiles(times)
        rows.append(
            {
                "batch": key.batch, "k": key.k, "context": context, "step_ms": spread["p50"], "p20_ms": spread["p20"],
                "p80_ms": spread["p80"], "replays": len(times),
            }
        )  # fmt: skip
    return rows


def measure_prefill(options: EngineOptions, loaded: LoadedModel, tokens: int = 64, rounds: int = 5) -> float:
    """Milliseconds a prompt token takes, through target and drafter: the median of prompts of `tokens` tokens."""
    k = 0 if options.drafter == "none" else max(options.k or 0, 1)  # at k = 0 a drafter would have no prompt to run
    options = replace(options, k=k, schedule=None, policy=None, policy_options=None, max_batch=1, max_len=tokens + 8)
    step = build_engine(options, loaded).engine.graphs.step
    place_everywhere(step.state, tokens)
    times_ms = []
    for _ in range(rounds + 1):
        start_s = time.perf_counter()
        with torch.no_grad():
            step.prefill(0, [1] * (tokens - 1), 0)
        if step.state.slots.is_cuda:
            torch.cuda.synchronize()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return median(times_ms[1:]) / (tokens - 1)


def measure_acceptance(
    options: EngineOptions, loaded: LoadedModel, k: int, prompts: Sequence[str], params: SamplingParams
) -> dict:
    """Acceptance over prompts at `k`: `{"per_position", "reached", "acceptance_length", "prompts", "tokens", …}`.

    `per_position` is of the drafts there were; `reached` is of the steps whose earlier drafts were all accepted, whether or
    not a draft was there (look-up often has none): the rates from which the tokens of a step are expected.
    """
    ids = [encode_prompt(prompt, loaded.tokenizer) for prompt in prompts]
    max_len = min(max(map(len, ids)) + params.max_new_tokens + 1, loaded.model.max_positions)
    options = replace(
        options, k=k, schedule=None, policy=None, policy_options=None, max_batch=min(8, len(ids)), max_len=max_len
    )
    engine = build_engine(options, loaded).engine
    engine.generate(ids, params)
    report, before, reached = engine.report(), engine.stats.request_steps, []
    for accepted in engine.stats.accepted_at:
        reached.append(accepted / before if before else 0.0)
        before = accepted
    return {
        "per_position": report["per_position_acceptance"], "reached": reached, "acceptance_length": report["acceptance_length"],
        "prompts": len(ids), "tokens": report["tokens"], "request_steps": report["request_steps"],
    }  # fmt: skip


def best_schedule(
    cost: CostTable, rates: Sequence[float], max_batch: int, context: int | None = None, margin: float = 0.02
) -> list[list[int]]:
    """`[[first, last, k], …]`: for each batch the k with the most expected tokens a millisecond.

    A range goes on while its k is within `margin` of the best one, since a change of k is worth no more than the noise of the
    times it is judged by.

    Args:
        cost: step times.
        rates: acceptance by position once reached; the last one holds for later positions.
        max_batch: largest batch.
        context: tokens of a request, as for `CostTable.step_ms`.
        margin: as a fraction.
    """
    ks = sorted(cost.ks)
    expected = {k: expected_tokens(rates or [0.0], k) for k in ks}
    ranges: list[list[int]] = []
    for batch in range(1, max_batch + 1):
        promised = {k: expected[k] / cost.step_ms(batch, k, context) for k in ks}
        best = max(ks, key=promised.__getitem__)
        if ranges and promised[ranges[-1][2]] * (1 + margin) >= promised[best]:
            ranges[-1][1] = batch
        else:
            ranges.append([batch, batch, best])
    return ranges
