"""What the policies that learn have in common: a set of k that any batch may run at, and acceptance by position."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

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
    """Acceptance by position of one or more requests, from counts that are forgotten slowly.

        s_j ← γ s_j + accepted at j,   t_j ← γ t_j + reached at j
        a_j = (s_j + w b_j) / (t_j + w),   b_1 = prior_1,   b_{j+1} = min(1, a_j prior_{j+1} / prior_j)

    A request reaches a position when all its drafts before it were accepted, so a_j is a conditional rate and the expected
    tokens of a step are 1 + Σ_{j ≤ k} Π_{i ≤ j} a_i. A position without data follows the rate of the one before it, as the
    prior has it; a flat prior makes that Leviathan's i.i.d. model (2023).

    Args:
        rows: requests counted apart.
        positions: how many.
        memory: γ, 0..1; what is left of a count after each step that drafted at its position.
        weight: w, of the prior, in requests.
        pooled: one rate for all positions of a row.
    """

    def __init__(self, rows: int, positions: int, memory: float, weight: float, pooled: bool = False):
        self.memory, self.weight, self.pooled = memory, weight, pooled
        self.accepted, self.reached = np.zeros((rows, positions)), np.zeros((rows, positions))

    def observe(self, rows: np.ndarray | slice, k: int, counts: Sequence[int]) -> None:
        """Take in that rows ran with `k` drafts, of which `counts` were accepted; with a single row, all counts are its own."""
        accepted, column = np.asarray(counts)[:, None], np.arange(k)
        hits, tries = column < accepted, column <= accepted
        if len(self.accepted) == 1:
            hits, tries = hits.sum(0, keepdims=True), tries.sum(0, keepdims=True)
        for total, new in ((self.accepted, hits), (self.reached, tries)):
            total[rows, :k] = self.memory * total[rows, :k] + new

    def rates(self, rows: np.ndarray | slice, prior: np.ndarray) -> np.ndarray:
        """`[rows, positions]`: a_1 .. of these rows; `prior [positions]`."""
        accepted, reached, weight = self.accepted[rows], self.reached[rows], self.weight
        if self.pooled:
            rate = (accepted.sum(1, keepdims=True) + weight * prior[0]) / (reached.sum(1, keepdims=True) + weight)
            return np.broadcast_to(rate, accepted.shape)
        rates, before = np.empty_like(accepted), prior[0]
        for j, step in enumerate((*(prior[1:] / np.maximum(prior[:-1], 1e-9)), 1.0)):
            rates[:, j] = (accepted[:, j] + weight * before) / (reached[:, j] + weight)
            before = np.minimum(1.0, step * rates[:, j])
        return rates

    def to_dict(self) -> dict[str, Any]:
        """The counts, JSON-able."""
        return {"accepted": self.accepted.tolist(), "reached": self.reached.tolist()}

    def restore(self, counts: dict[str, Any]) -> None:
        """Take over counts of `to_dict`."""
        self.accepted, self.reached = np.array(counts["accepted"], float), np.array(counts["reached"], float)


def expected_tokens(rates: np.ndarray) -> np.ndarray:
    """E by k, `[.., positions + 1]` from rates `[.., positions]`: 1 + Σ_{j ≤ k} Π_{i ≤ j} a_i."""
    ones = np.ones((*rates.shape[:-1], 1))
    return np.concatenate([ones, 1 + rates.cumprod(-1).cumsum(-1)], -1)
