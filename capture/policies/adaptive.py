"""What the policies that learn have in common: a set of k that any batch may run at, and acceptance by position."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.keys import MAX_BATCH, KeySet, reachable_keys
from stepgraph.capture.schedule import DEFAULT_MAX_K, require_int, show


def checked_ks(ks: Iterable[int], max_k: int = DEFAULT_MAX_K) -> tuple[int, ...]:
    """The k of a policy, ascending and each once.

    Raises:
        ValueError: there is none, or one is not an integer in 0..max_k.
    """
    if isinstance(ks, str) or not isinstance(ks, Iterable):
        raise ValueError(f"ks is {show(ks)}; it must be a list of integers from 0 to {max_k}.")
    checked = tuple(sorted({require_int("a k in ks", k, 0, max_k) for k in ks}))
    if not checked:
        raise ValueError("ks is empty; give at least one k.")
    return checked


def checked_number(name: str, value: Any, low: float, high: float) -> float:
    """`value` when it is a number in low..high; a ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} is {show(value)}; it must be a number from {low:g} to {high:g}.")
    return float(value)


def table_and_ks(cost: CostTable | str | os.PathLike[str], ks: Iterable[int] | None) -> tuple[CostTable, tuple[int, ...]]:
    """The step times, read where `cost` is the path of a profile, and the k to choose from, all of the table's for None.

    Raises:
        ValueError: the profile cannot be read, or the table lacks one of the k.
    """
    table = cost if isinstance(cost, CostTable) else CostTable.load(cost)
    checked = checked_ks(table.ks if ks is None else ks)
    if missing := set(checked) - table.ks:
        raise ValueError(f"ks has {min(missing)}; the cost table has {', '.join(map(str, sorted(table.ks)))}.")
    return table, checked


class AnyBatch:
    """Mixin: every k of `_ks`, an ascending tuple, may run at every batch size."""

    _ks: tuple[int, ...]

    @property
    def ks(self) -> frozenset[int]:
        return frozenset(self._ks)

    def reachable(self, max_batch: int) -> set[tuple[int, int]]:
        return {(n, k) for n in range(1, require_int("max_batch", max_batch, 1, MAX_BATCH) + 1) for k in self._ks}

    def keys(self, max_batch: int, rungs: Sequence[int] | None = None) -> KeySet:
        return reachable_keys(self.reachable(max_batch), max_batch, rungs)


class PositionRates:
    """Acceptance by position over all requests, from counts that are forgotten slowly.

        s_j ← γ s_j + accepted at j,   t_j ← γ t_j + reached at j
        a_j = (s_j + w b_j) / (t_j + w),   b_1 = prior_1,   b_{j+1} = min(1, a_j prior_{j+1} / prior_j)

    A request reaches a position when all its drafts before it were accepted, so a_j is a conditional rate and the expected
    tokens of a step are 1 + Σ_{j ≤ k} Π_{i ≤ j} a_i. A position without data follows the rate of the one before it, as the
    prior has it; a flat prior makes that Leviathan's i.i.d. model (2023).

    Args:
        prior: a rate for each position.
        memory: γ, 0..1; what is left of a count after each step that drafted at its position.
        weight: w, of the prior, in requests.
        pooled: one rate for all positions, with the first as its prior.
    """

    def __init__(self, prior: Sequence[float], memory: float, weight: float, pooled: bool = False):
        self.prior, self.memory, self.weight, self.pooled = list(prior), memory, weight, pooled
        self.accepted, self.reached = [0.0] * len(self.prior), [0.0] * len(self.prior)

    def observe(self, k: int, counts: Sequence[int]) -> None:
        """Take in requests that ran with `k` drafts each, of which `counts` were accepted."""
        ended = [0] * (k + 1)
        for count in counts:
            ended[count] += 1
        left = len(counts)
        for j in range(k):
            self.reached[j] = self.memory * self.reached[j] + left
            left -= ended[j]
            self.accepted[j] = self.memory * self.accepted[j] + left

    def rates(self) -> list[float]:
        """a_1 .. by position."""
        weight = self.weight
        if self.pooled:
            rate = (sum(self.accepted) + weight * self.prior[0]) / (sum(self.reached) + weight)
            return [rate] * len(self.prior)
        rates, before, last = [], self.prior[0], 0.0
        for accepted, reached, prior in zip(self.accepted, self.reached, self.prior, strict=True):
            if rates:
                before = min(1.0, rates[-1] * prior / max(last, 1e-9))
            rates.append((accepted + weight * before) / (reached + weight))
            last = prior
        return rates


class RequestRates:
    """The same of each request apart, by rows of one table.

        a_{r,j} = (s_{r,j} + w a_j) / (t_{r,j} + w)

    with a_j of all requests (`PositionRates`), so a new request starts as all others go on. Rows of requests that are gone are
    given to new ones.
    """

    def __init__(self, positions: int, memory: float, weight: float, pooled: bool = False):
        self.memory, self.weight, self.pooled = memory, weight, pooled
        self.counts = np.zeros((2, 0, positions))  # accepted, reached
        self.row: dict[int, int] = {}

    def observe(self, k: int, requests: Sequence[int], counts: Sequence[int]) -> None:
        """As `PositionRates.observe`; requests that have no row (any more) are passed over."""
        known = [(self.row[r], count) for r, count in zip(requests, counts, strict=True) if r in self.row]
        if known:
            rows, accepted = np.array(known).T
            column = np.arange(k)
            new = np.stack([column < accepted[:, None], column <= accepted[:, None]])
            self.counts[:, rows, :k] = self.memory * self.counts[:, rows, :k] + new

    def rates(self, requests: Sequence[int], common: Sequence[float]) -> np.ndarray:
        """`[requests, positions]`; these are the only requests there are."""
        rows = self._rows_of(requests)  # may move the counts
        accepted, reached = self.counts[:, rows]
        if self.pooled:
            accepted, reached = accepted.sum(1, keepdims=True), reached.sum(1, keepdims=True)
        return (accepted + self.weight * np.array(common)) / (reached + self.weight)

    def _rows_of(self, requests: Sequence[int]) -> list[int]:
        if len(self.row) != len(requests) or any(request not in self.row for request in requests):
            alive = set(requests)
            self.row = {request: row for request, row in self.row.items() if request in alive}
            rows = self.counts.shape[1]
            if len(requests) > rows:
                self.counts = np.pad(self.counts, ((0, 0), (0, len(requests) - rows + 8), (0, 0)))
            free = iter(sorted(set(range(self.counts.shape[1])) - set(self.row.values())))
            for request in requests:
                if request not in self.row:
                    self.row[request] = row = next(free)
                    self.counts[:, row] = 0
        return [self.row[request] for request in requests]


def expected_tokens(rates: np.ndarray) -> np.ndarray:
    """E by k, `[.., positions + 1]` from rates `[.., positions]`: 1 + Σ_{j ≤ k} Π_{i ≤ j} a_i."""
    ones = np.ones((*rates.shape[:-1], 1))
    return np.concatenate([ones, 1 + rates.cumprod(-1).cumsum(-1)], -1)
