"""An engine under load: requests arrive in real time, and the run is reported as a simulated one is."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepgraph.capture.engine import Engine
from stepgraph.capture.launched import StepRecord
from stepgraph.capture.request import SamplingParams
from stepgraph.capture.simulate.arrivals import Arrivals
from stepgraph.capture.simulate.report import ServingRun, count_switches
from stepgraph.capture.simulate.server import Texts


@dataclass(frozen=True)
class Observed:
    """What a run left behind.

    Attributes:
        run: its report.
        counts: accepted drafts of each request, step by step.
    """

    run: ServingRun
    counts: list[list[int]]


def serve_engine(
    name: str,
    engine: Engine,
    arrivals: Arrivals,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Observed:
    """Drive the engine with requests that come when `arrivals` says, until all are done.

    Args:
        name: of the run.
        engine: idle, with its graphs captured.
        arrivals: when requests come, and how long their answers are. Every request gets all its tokens: the model's stops are
            ignored.
        prompts: token ids of each request.
        params: everything but the length of the answers.
        clock, sleep: seconds.

    Raises:
        ValueError: a request does not fit the engine.
    """
    params = replace(params, ignore_eos=True)
    total, number_of, outputs = len(arrivals), {}, {}
    counts: list[list[int]] = [[] for _ in range(total)]
    ks: list[int] = []
    # A request that comes while a step runs waits for its end before the engine hears of it; to whoever sent it, it has come.
    waited_ms = np.zeros(total)

    def take(record: StepRecord) -> None:
        ks.append(record.k_run)
        for request, accepted in zip(record.requests, record.accepted, strict=True):
            counts[number_of[request]].append(accepted)

    engine.on_step = take
    stats = engine.stats
    decode_s = stats.prefill_s - stats.elapsed_s
    start_s, arrived = clock(), 0
    while len(outputs) < total:
        now_ms = (clock() - start_s) * 1e3
        if arrived < total and not engine.unfinished and arrivals.at_ms[arrived] > now_ms:
            sleep((arrivals.at_ms[arrived] - now_ms) / 1e3)
            continue
        while arrived < total and arrivals.at_ms[arrived] <= now_ms:
            each = replace(params, max_new_tokens=int(arrivals.output[arrived]))
            number_of[engine.add(prompts[arrived], each)] = arrived
            waited_ms[arrived] = now_ms - arrivals.at_ms[arrived]
            arrived += 1
        for output in engine.step():
            outputs[number_of[output.id]] = output
    elapsed_ms, engine.on_step = (clock() - start_s) * 1e3, None
    decode_s += stats.elapsed_s - stats.prefill_s
    in_order = [outputs[number] for number in range(total)]
    run = ServingRun(
        name, total, sum(len(output.token_ids) for output in in_order), elapsed_ms - float(arrivals.at_ms[0]), decode_s * 1e3,
        len(ks), sum(map(len, counts)), count_switches(ks), {k: ks.count(k) for k in sorted(set(ks))},
        np.array([output.ttft_ms for output in in_order]) + waited_ms,
        np.array([output.tpot_ms for output in in_order if output.tpot_ms is not None]),
    )  # fmt: skip
    return Observed(run, counts)


def texts_of(observed: Observed, arrivals: Arrivals, k_max: int, rng: np.random.Generator) -> Texts:
    """The acceptance that the run saw, for a simulation of it.

    A step that starts where one of the engine's did has that one's count. Other places, which a policy reaches only if it
    chooses otherwise, have a count drawn from the request's own.
    """
    parts = []
    for counts, length in zip(observed.counts, arrivals.output.tolist(), strict=True):
        part = rng.choice(counts, length)
        places = np.cumsum([0, *(np.array(counts[:-1], dtype=int) + 1)])
        part[places] = counts
        parts.append(part)
    first = arrivals.output.cumsum() - arrivals.output
    return Texts(np.concatenate(parts).astype(np.int64), first, k_max)
