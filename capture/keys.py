"""Which graphs to capture: for each k a ladder of batch buckets over the batch sizes that can run at that k.

A step of n requests at k replays the smallest captured bucket ≥ n of the same k; the surplus rows are padding. Capturing
every bucket at every k would be |rungs| × |k| graphs; a schedule can reach only a few of them.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stepgraph.capture.schedule import Schedule, require_int

# What may be asked for: a schedule, {batch: ks}, or pairs (batch, k).
Reach = Schedule | Mapping[int, Iterable[int]] | Iterable[tuple[int, int]]

# Bounds the work that a mistyped max_batch can cause.
MAX_BATCH = 1 << 16

# A held pair (see `reachable_keys`) may ride in a bucket that wastes up to this fraction of its n.
HELD_PADDING = 0.5


@dataclass(frozen=True, order=True, slots=True)
class GraphKey:
    """All that shapes a graph.

    Attributes:
        batch: bucket, in requests (rows), padding included.
        k: draft tokens per request.
    """

    batch: int
    k: int

    def __post_init__(self) -> None:
        require_int("batch", self.batch, 1)
        require_int("k", self.k, 0)

    @property
    def query_len(self) -> int:
        """Target tokens verified per request, k + 1."""
        return self.k + 1


@dataclass(frozen=True)
class Padding:
    """Padding over a set of (batch, k), each counted once; fractions are padding rows / live rows.

    Attributes:
        mean: mean fraction.
        worst: largest fraction.
        worst_at: the (batch, k) that has it, None when nothing was looked up.
        misses: pairs without a captured key; they are in neither mean nor worst.
    """

    mean: float
    worst: float
    worst_at: tuple[int, int] | None
    misses: tuple[tuple[int, int], ...]


class KeySet:
    """An immutable set of graph keys with the one mapping from a live batch to its graph.

    Inputs are laid out and graphs are replayed through the same `lookup`, so the two cannot disagree.
    """

    def __init__(self, keys: Iterable[GraphKey]):
        self._keys = tuple(sorted(set(keys)))
        ladders: dict[int, list[GraphKey]] = {}
        for key in self._keys:
            ladders.setdefault(key.k, []).append(key)
        self._ladders = {k: tuple(ladder) for k, ladder in ladders.items()}
        self._buckets = {k: tuple(key.batch for key in ladder) for k, ladder in ladders.items()}

    @classmethod
    def for_policy(cls, ks: Iterable[int], max_batch: int, rungs: Sequence[int] | None = None) -> "KeySet":
        """Keys for a policy that may ask any k of `ks` at any batch size in 1..max_batch."""
        require_int("max_batch", max_batch, 1, MAX_BATCH)
        ks = frozenset(ks)
        return reachable_keys({n: ks for n in range(1, max_batch + 1)}, max_batch, rungs)

    def lookup(self, n: int, k: int) -> GraphKey | None:
        """The cheapest captured key that can run `n` live requests at `k`: same k, smallest bucket ≥ n; None on a miss."""
        if n < 1:
            raise ValueError(f"batch is {n}; a step needs at least 1 live request.")
        buckets = self._buckets.get(k, ())
        rung = bisect_left(buckets, n)
        return self._ladders[k][rung] if rung < len(buckets) else None

    def buckets(self, k: int) -> tuple[int, ...]:
        """Captured buckets of one k, ascending; empty when k has no graph."""
        return self._buckets.get(k, ())

    @property
    def ks(self) -> frozenset[int]:
        """Every k that has at least one graph."""
        return frozenset(self._buckets)

    def padding(self, reach: Reach, max_batch: int) -> Padding:
        """Padding over what `reach` can ask for at batch sizes 1..max_batch."""
        pairs = sorted(_pairs(reach, max_batch))
        found = [(self.lookup(n, k), n, k) for n, k in pairs]
        waste = [((key.batch - n) / n, (n, k)) for key, n, k in found if key is not None]
        worst, worst_at = max(waste, key=lambda item: item[0], default=(0.0, None))
        mean = sum(fraction for fraction, _ in waste) / max(len(waste), 1)
        return Padding(mean, worst, worst_at, tuple((n, k) for key, n, k in found if key is None))

    def __iter__(self) -> Iterator[GraphKey]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, GraphKey) and key.batch in self._buckets.get(key.k, ())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeySet) and self._keys == other._keys

    def __hash__(self) -> int:
        return hash(self._keys)

    def __repr__(self) -> str:
        ladders = ", ".join(f"k={k}: {list(buckets)}" for k, buckets in sorted(self._buckets.items()))
        return f"KeySet({len(self)} graphs; {ladders})"


def default_rungs(max_batch: int) -> tuple[int, ...]:
    """Bucket sizes up to `max_batch`, dense where batches are small, since padding 5 to 8 costs more than 125 to 128.

    1–8, by 2 to 16, by 4 to 32, by 8 to 128, then 8 steps an octave, so that padding is below 1/4 of n everywhere and below
    1/8 from 65 on. `max_batch` is always the last one.
    """
    require_int("max_batch", max_batch, 1, MAX_BATCH)
    rungs, rung = [], 1
    while rung < max_batch:
        rungs.append(rung)
        octave = 1 << (rung.bit_length() - 1)
        rung += max(octave // 8, min(8, octave // 4), 1)
    return (*rungs, max_batch)


def reachable_keys(
    reach: Reach, max_batch: int, rungs: Sequence[int] | None = None, held: Iterable[tuple[int, int]] = ()
) -> KeySet:
    """The keys that cover exactly what can be asked for.

    Batch sizes that may run at one k form intervals [a, b]. Each gives the rungs in [a, b) and b itself, so that every rung
    is some n's own bucket and no step is padded beyond its interval.

    Args:
        reach: a schedule (batch sizes 1..max_batch), `{batch: ks}`, or pairs (batch, k).
        max_batch: largest live batch, in requests.
        rungs: ascending bucket sizes; those above `max_batch` are unused. `default_rungs` if None.
        held: further pairs (batch, k) that a policy asks for now and then. They ride in the buckets of `reach`, and get a
            rung of their own only where those would miss or pad by more than `HELD_PADDING`.
    """
    pairs = _pairs(reach, max_batch)
    rungs = default_rungs(max_batch) if rungs is None else _checked_rungs(rungs)
    batches: dict[int, list[int]] = {}
    for n, k in sorted(pairs):
        batches.setdefault(k, []).append(n)
    keys = {
        GraphKey(bucket, k)
        for k, live in batches.items()
        for first, last in _intervals(live)
        for bucket in (*rungs[bisect_left(rungs, first) : bisect_left(rungs, last)], last)
    }
    captured = KeySet(keys)
    for n, k in sorted(_pairs(held, max_batch)):
        key = captured.lookup(n, k)
        if key is None or key.batch - n > HELD_PADDING * n:
            rung = bisect_left(rungs, n)
            bucket = min(rungs[rung], max_batch) if rung < len(rungs) else n
            captured = KeySet((*captured, GraphKey(bucket, k)))
    return captured


def _pairs(reach: Reach, max_batch: int) -> set[tuple[int, int]]:
    require_int("max_batch", max_batch, 1, MAX_BATCH)
    if isinstance(reach, Schedule):
        return {(n, k) for first, last, k in reach.ranges(max_batch) for n in range(first, last + 1)}
    if isinstance(reach, Mapping):
        reach = ((n, k) for n, ks in reach.items() for k in ks)
    return {(require_int("batch", n, 1, max_batch), require_int("k", k, 0)) for n, k in reach}


def _checked_rungs(rungs: Sequence[int]) -> tuple[int, ...]:
    checked = tuple(require_int("a rung", rung, 1) for rung in rungs)
    if not checked:
        raise ValueError("rungs is empty; give at least one bucket size.")
    for lower, upper in pairwise(checked):
        if lower >= upper:
            raise ValueError(f"rungs must ascend strictly, but {upper} follows {lower}.")
    return checked


def _intervals(batches: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Maximal runs of consecutive integers in an ascending list, as (first, last)."""
    first = previous = batches[0]
    for n in batches[1:]:
        if n != previous + 1:
            yield first, previous
            first = n
        previous = n
    yield first, previous
