"""A server before which requests queue, event by event, in the order in which the engine does things.

A round admits what has arrived, runs one chunk of the oldest prompt that is not through, then one decoding step over all
requests that are; time is what the cost table and the prefill rate say.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.keys import MAX_BATCH
from stepgraph.capture.policies import KPolicy
from stepgraph.capture.policies.adaptive import checked_number
from stepgraph.capture.schedule import require_int
from stepgraph.capture.simulate.arrivals import Arrivals
from stepgraph.capture.simulate.report import ServingRun, count_switches
from stepgraph.capture.simulate.worlds import World


@dataclass(frozen=True)
class Server:
    """What requests meet.

    Attributes:
        cost: time of a decoding step.
        prefill_ms_per_token: of a prompt.
        max_batch: most requests at once, prefilling ones included.
        prefill_chunk: most prompt tokens between two steps.
        lag: steps launched before the result of one is known to the policy.
    """

    cost: CostTable
    prefill_ms_per_token: float = 0.0
    max_batch: int = 32
    prefill_chunk: int = 256
    lag: int = 0

    def __post_init__(self):
        checked_number("prefill_ms_per_token", self.prefill_ms_per_token, 0, 1e6)
        require_int("max_batch", self.max_batch, 1, MAX_BATCH)
        require_int("prefill_chunk", self.prefill_chunk, 1)
        require_int("lag", self.lag, 0, 16)


@dataclass(frozen=True)
class Texts:
    """The drafts that would be accepted at every position of every request's answer.

    Attributes:
        counts: `[all output tokens]`, accepted of k_max drafts for a step that starts there.
        first: `[N]`, where each request's counts begin.
        k_max: largest k they tell about.
    """

    counts: np.ndarray
    first: np.ndarray
    k_max: int


def draw_texts(world: World, arrivals: Arrivals, rng: np.random.Generator, k_max: int) -> Texts:
    """Each request's own draw of the world, so that a policy cannot change it."""
    parts = [world.draw(rng, length, 1, k_max)[:, 0] for length in arrivals.output.tolist()]
    first = arrivals.output.cumsum() - arrivals.output
    return Texts(np.concatenate(parts).astype(np.int64), first, k_max)


def serve(name: str, policy: KPolicy | None, server: Server, arrivals: Arrivals, texts: Texts) -> ServingRun:
    """All requests, to their last token.

    Args:
        name: of the run.
        policy: chooses k; None is the oracle, which knows each step's counts and takes the most tokens per millisecond.
        server, arrivals, texts: the world.

    Raises:
        ValueError: the policy may ask a k beyond the texts' or one that the cost table lacks.
    """
    oracle_ks = sorted(k for k in server.cost.ks if k <= texts.k_max)
    asks = set(oracle_ks) if policy is None else policy.ks
    if wrong := sorted(asks - set(oracle_ks)):
        raise ValueError(f"policy {name} may ask k={wrong[0]}; the world has {', '.join(map(str, oracle_ks))}.")
    total, cost = len(arrivals), server.cost
    at_ms, prompt_left = arrivals.at_ms, arrivals.prompt - 1  # the last prompt token is the first step's input
    done = np.zeros(total, dtype=np.int64)
    first_ms, last_ms = np.full(total, np.nan), np.zeros(total)
    prefilling: deque[int] = deque()
    running = np.empty(0, dtype=np.int64)
    late: deque[tuple[int, list[int], list[int]]] = deque()
    now, decode_ms, arrived, request_steps, ks = 0.0, 0.0, 0, 0, []
    while arrived < total or prefilling or len(running):
        if not prefilling and not len(running) and at_ms[arrived] > now:
            now = float(at_ms[arrived])
        while arrived < total and at_ms[arrived] <= now and len(prefilling) + len(running) < server.max_batch:
            prefilling.append(arrived)
            arrived += 1
        if prefilling:
            oldest = prefilling[0]
            chunk = min(server.prefill_chunk, int(prompt_left[oldest]))
            prompt_left[oldest] -= chunk
            now += chunk * server.prefill_ms_per_token
            while prefilling and prompt_left[prefilling[0]] == 0:
                running = np.append(running, prefilling.popleft())
        if not len(running):
            continue
        batch, starts = len(running), done[running]
        context = int((arrivals.prompt[running] + starts).sum()) // batch
        counts, left = texts.counts[texts.first[running] + starts], arrivals.output[running] - starts
        requests = running.tolist()
        if policy is None:
            promised = [(np.minimum(counts, k).sum() + batch) / cost.step_ms(batch, k, context) for k in oracle_ks]
            k = oracle_ks[int(np.argmax(promised))]
        else:
            k = policy.choose(batch, context, requests)
        step_ms = cost.step_ms(batch, k, context)
        now, decode_ms, request_steps = now + step_ms, decode_ms + step_ms, request_steps + batch
        ks.append(k)
        accepted = np.minimum(counts, k)
        done[running] += np.minimum(accepted + 1, left)
        first_ms[running] = np.where(starts == 0, now, first_ms[running])
        last_ms[running] = now
        running = running[done[running] < arrivals.output[running]]
        if policy is not None:
            late.append((k, accepted.tolist(), requests))
            if len(late) > server.lag:
                policy.observe(*late[0][:2], server.lag, late.popleft()[2])
    several = arrivals.output > 1
    tpot_ms = (last_ms - first_ms)[several] / (arrivals.output[several] - 1)
    steps_at_k = {k: ks.count(k) for k in set(ks)}
    return ServingRun(
        name, total, int(done.sum()), now - float(at_ms[0]), decode_ms, len(ks), request_steps, count_switches(ks), steps_at_k,
        first_ms - at_ms, tpot_ms,
    )  # fmt: skip
