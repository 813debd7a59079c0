"""How many of k_max drafts would be accepted, drawn for many steps at once.

A step at k ≤ k_max has min(count, k) of them accepted: acceptance of a draft depends on the text, not on how many were asked
for after it. Counts are drawn before any policy runs, so that all policies live in the same world.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from stepgraph.capture.policies.adaptive import checked_number
from stepgraph.capture.schedule import DEFAULT_MAX_K, require_int, show


class World(Protocol):
    """Draws counts `[steps, rows]` of accepted drafts, 0..k_max."""

    def draw(self, rng: np.random.Generator, steps: int, rows: int, k_max: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Rates:
    """Position j is accepted with `rates[j]` if all before it were; beyond the last rate the last one holds.

    One rate is the i.i.d. world.
    """

    rates: tuple[float, ...]

    def __post_init__(self):
        if not self.rates:
            raise ValueError("rates is empty; a world needs at least one rate from 0 to 1.")
        for rate in self.rates:
            checked_number("a rate of the world", rate, 0, 1)

    def by_position(self, k_max: int) -> np.ndarray:
        """`[k_max]`."""
        given = self.rates[:k_max]
        return np.array([*given, *[self.rates[-1]] * (k_max - len(given))], dtype=float)

    def draw(self, rng: np.random.Generator, steps: int, rows: int, k_max: int) -> np.ndarray:
        uniform, counts = rng.random((steps, rows)), np.zeros((steps, rows), dtype=np.int16)
        # One number decides a row: it has j drafts accepted when it lies below the chance of at least j.
        for survival in self.by_position(k_max).cumprod():
            counts += uniform < survival
        return counts


@dataclass(frozen=True)
class Regimes:
    """Several worlds that take turns, each for a geometric number of steps with mean `dwell`; all rows turn together."""

    worlds: tuple[Rates, ...]
    dwell: float

    def __post_init__(self):
        if not 2 <= len(self.worlds) <= 32:  # NumPy's choose takes no more
            raise ValueError(f"regimes has {len(self.worlds)} worlds; it needs at least two worlds and takes at most 32.")
        checked_number("dwell", self.dwell, 1, 1e9)

    def draw(self, rng: np.random.Generator, steps: int, rows: int, k_max: int) -> np.ndarray:
        turns = (rng.random(steps) < 1 / self.dwell).cumsum() + rng.integers(len(self.worlds))
        drawn = [world.draw(rng, steps, rows, k_max) for world in self.worlds]
        return np.choose((turns % len(self.worlds))[:, None], drawn)


@dataclass(frozen=True)
class Recorded:
    """Counts that an engine recorded at k = `k_max`, one sequence a request; rows replay sequences from random places."""

    sequences: tuple[tuple[int, ...], ...]
    k_max: int

    @classmethod
    def load(cls, path: str | Path) -> "Recorded":
        """Read a file of `stepgraph generate --k K --log-steps FILE`.

        Raises:
            ValueError: it cannot be read, holds no step that drafted, or k changed in it.
        """
        name, sequences, ks = Path(path).name, {}, set()
        try:
            records = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n") if line.strip()]
            for record in records:
                if require_int("k_run", record["k_run"], 0, DEFAULT_MAX_K):
                    ks.add(record["k_run"])
                    for request, count in zip(record["requests"], record["accepted"], strict=True):
                        sequences.setdefault(request, []).append(require_int("accepted", count, 0, record["k_run"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"step log {name} cannot be read: {error}") from None
        if len(ks) != 1:
            raise ValueError(f"step log {name} has steps at k = {show(sorted(ks))}; one k > 0 is needed, the largest there is.")
        return cls(tuple(map(tuple, sequences.values())), ks.pop())

    def draw(self, rng: np.random.Generator, steps: int, rows: int, k_max: int) -> np.ndarray:
        if k_max > self.k_max:
            raise ValueError(f"k_max is {k_max}; the recorded steps ran at k = {self.k_max}, and nobody knows further.")
        columns = []
        for _ in range(rows):
            parts, length = [], 0
            while length < steps:
                sequence = self.sequences[rng.integers(len(self.sequences))]
                parts.append(sequence)
                length += len(sequence)
            columns.append(np.concatenate(parts)[:steps])
        return np.minimum(np.stack(columns, 1), k_max).astype(np.int16)


def parse_world(text: str) -> World:
    """`iid:RATE`, `positions:RATE,…`, `regimes:DWELL:RATE,…/RATE,…` or `recorded:FILE`.

    Raises:
        ValueError: anything else.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "iid":
            return Rates((float(rest),))
        if kind == "positions":
            return Rates(tuple(map(float, rest.split(","))))
        if kind == "regimes":
            dwell, _, worlds = rest.partition(":")
            return Regimes(tuple(Rates(tuple(map(float, part.split(",")))) for part in worlds.split("/")), float(dwell))
    except ValueError as error:
        raise ValueError(f"world is {text!r}: {error}") from None
    if kind == "recorded" and rest:
        return Recorded.load(rest)
    raise ValueError(
        f"world is {text!r}; allowed are iid:RATE, positions:RATE,…, regimes:DWELL:RATE,…/RATE,… and recorded:FILE.jsonl"
    )


def leviathan_cost(c: float, ks: Sequence[int]) -> list[dict]:
    """Rows of a cost table in which a step takes 1 + c k (Leviathan et al. 2023), in units of a plain step, at any batch."""
    checked_number("the draft cost c", c, 0, 100)
    return [{"batch": 1, "k": k, "context": 0, "step_ms": 1.0 + c * k} for k in ks]
