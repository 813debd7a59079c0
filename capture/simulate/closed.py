"""A batch of constant size that never ends: the world in which regret has a definition nobody disputes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.policies import KPolicy
from stepgraph.capture.simulate.report import count_switches


@dataclass(frozen=True)
class ClosedRun:
    """What a policy did to a batch of `batch` requests.

    Attributes:
        name: of the policy.
        steps, batch: how long and how wide.
        tokens: emitted by all requests together.
        elapsed_ms: of all steps.
        switches: changes of k.
        steps_at_k: steps by k.
    """

    name: str
    steps: int
    batch: int
    tokens: int
    elapsed_ms: float
    switches: int
    steps_at_k: dict[int, int]

    @property
    def ms_per_token(self) -> float:
        return self.elapsed_ms / self.tokens

    def regret(self, best: "ClosedRun") -> float:
        """Share of the tokens per millisecond of `best` that this run does not reach."""
        return 1 - best.ms_per_token / self.ms_per_token


def emitted(counts: np.ndarray, k: int | np.ndarray) -> np.ndarray:
    """`[steps]`: tokens that each step emits at k, one for all or `[steps, 1]`, from counts `[steps, batch]` of accepted drafts
    at k_max.
    """
    return np.minimum(counts, k).sum(1, dtype=np.int64) + counts.shape[1]


def run_choices(name: str, choices: np.ndarray, counts: np.ndarray, cost: CostTable, ks: Sequence[int]) -> ClosedRun:
    """A run whose k are known: `choices [steps]` are indices into `ks`."""
    batch = counts.shape[1]
    tokens = emitted(counts, np.array(ks, dtype=counts.dtype)[choices, None]).sum()
    steps = np.bincount(choices, minlength=len(ks))
    elapsed = float(sum(n * cost.step_ms(batch, k) for n, k in zip(steps.tolist(), ks, strict=True)))
    by_k = {k: n for k, n in zip(ks, steps.tolist(), strict=True) if n}
    return ClosedRun(name, len(choices), batch, int(tokens), elapsed, count_switches(choices), by_k)


def fixed_runs(counts: np.ndarray, cost: CostTable, ks: Sequence[int]) -> list[ClosedRun]:
    """Every fixed k, for the best in hindsight."""
    steps = len(counts)
    return [run_choices(f"fixed:{k}", np.full(steps, i), counts, cost, ks) for i, k in enumerate(ks)]


def oracle_run(counts: np.ndarray, cost: CostTable, ks: Sequence[int]) -> ClosedRun:
    """The k that emits the most tokens per millisecond in each step, for whoever knows the step before it runs.

    Ratios of single steps are not the ratio of sums, so the step's worth is tokens − rate · time at the best rate there is,
    found by repetition (Dinkelbach 1967); a few rounds settle it.
    """
    tokens = np.stack([emitted(counts, k) for k in ks], 1)
    times = np.array([cost.step_ms(counts.shape[1], k) for k in ks])
    rate = 0.0
    for _ in range(50):
        choices = (tokens - rate * times).argmax(1)
        better = tokens[np.arange(len(choices)), choices].sum() / times[choices].sum()
        if better <= rate * (1 + 1e-12):
            break
        rate = better
    return run_choices("oracle", choices, counts, cost, ks)


def run_policy(name: str, policy: KPolicy, counts: np.ndarray, cost: CostTable, ks: Sequence[int], lag: int = 0) -> ClosedRun:
    """The policy, step by step, seeing each result `lag` steps late.

    Raises:
        ValueError: the policy may ask a k that is not in `ks`.
    """
    if not policy.ks <= set(ks):
        raise ValueError(f"policy {name} may ask k={min(policy.ks - set(ks))}; the world has {', '.join(map(str, ks))}.")
    steps, batch = counts.shape
    index = {k: i for i, k in enumerate(ks)}
    choices = np.empty(steps, dtype=np.int64)
    rows, requests, choose, observe = counts.tolist(), list(range(batch)), policy.choose, policy.observe
    asked = [0] * steps
    for step in range(steps):
        k = asked[step] = choose(batch, None, requests)
        choices[step] = index[k]
        seen = step - lag
        if seen >= 0:
            ran = asked[seen]
            observe(ran, [min(count, ran) for count in rows[seen]], lag, requests)
    return run_choices(name, choices, counts, cost, ks)
