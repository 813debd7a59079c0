"""k by batch size, with hysteresis at the thresholds."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Self

from stepgraph.capture.keys import MAX_BATCH, KeySet, reachable_keys
from stepgraph.capture.schedule import Schedule, require_int

DEFAULT_HOLD_STEPS = 8

# A threshold's band is this fraction of it (at least one batch size): the noise of arrivals grows with the batch.
BAND_DIVISOR = 8


class SchedulePolicy:
    """`k = schedule(batch)`, except that near a threshold k stays for `hold_steps` steps after a change.

    Let a range of the schedule be [first, last]. Once k has changed to that range's k, it stays for `hold_steps` steps while
    first − band(first − 1) ≤ batch ≤ last + band(last), with band(t) = max(1, ⌊t / 8⌋). So a batch that flutters over a
    threshold changes k at most once per `hold_steps` steps, a batch that moves on changes it at once, and the pairs
    (batch, k) that hysteresis adds are few: about one more graph per threshold. (vLLM issue 49548 reports the throughput
    lost when k follows every flutter.)

    Args:
        schedule: batch size → k.
        hold_steps: steps between two changes of k near a threshold; 0 follows the schedule to the letter.
    """

    kind = "schedule"

    def __init__(self, schedule: Schedule, hold_steps: int = DEFAULT_HOLD_STEPS):
        if not isinstance(schedule, Schedule):
            raise ValueError(f"schedule is a {type(schedule).__name__}; it must be a Schedule (see Schedule.parse).")
        self.schedule = schedule
        self.hold_steps = require_int("hold_steps", hold_steps, 0)
        # `last` of the open tail is the largest batch anybody may capture, so its upper band is never used.
        self._ranges = schedule.ranges(max(MAX_BATCH, schedule.entries[-1][1]))
        self._firsts = [first for first, _, _ in self._ranges]
        self._current: int | None = None
        self._age = self.hold_steps

    @property
    def ks(self) -> frozenset[int]:
        return self.schedule.ks()

    def reachable(self, max_batch: int) -> set[tuple[int, int]]:
        pairs = {(n, k) for first, last, k in self.schedule.ranges(max_batch) for n in range(first, last + 1)}
        return pairs | self._held(max_batch)

    def keys(self, max_batch: int, rungs: Sequence[int] | None = None) -> KeySet:
        return reachable_keys(self.schedule, max_batch, rungs, held=self._held(max_batch))

    def choose(self, batch: int, context: int | None = None, requests: Sequence[int] | None = None) -> int:
        require_int("batch", batch, 1)
        wanted = bisect_right(self._firsts, batch) - 1
        if self._current is None:
            self._current = wanted
        elif wanted != self._current:
            low, high = _span(self._ranges[self._current])
            if self._age >= self.hold_steps or not low <= batch <= high:
                self._current, self._age = wanted, 0
        self._age = min(self._age + 1, self.hold_steps)
        return self._ranges[self._current][2]

    def observe(self, k_run: int, accepted: Sequence[int], lag: int = 0, requests: Sequence[int] | None = None) -> None:
        """Nothing to learn: the schedule is the measurement."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "schedule": self.schedule.to_list(),
            "max_k": self.schedule.max_k,
            "hold_steps": self.hold_steps,
            "current": self._current,
            "age": self._age,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        policy = cls(Schedule.parse(data["schedule"], data["max_k"]), data["hold_steps"])
        if data["current"] is not None:
            policy._current = require_int("current", data["current"], 0, len(policy._ranges) - 1)
        policy._age = require_int("age", data["age"], 0, policy.hold_steps)
        return policy

    def _held(self, max_batch: int) -> set[tuple[int, int]]:
        """(batch, k) that only hysteresis reaches. A range that starts above `max_batch` is never entered, so never held."""
        if not self.hold_steps:
            return set()
        held = set()
        for first, last, k in self._ranges:
            if first <= max_batch:
                low, high = _span((first, last, k))
                held |= {(n, k) for n in (*range(low, first), *range(last + 1, min(high, max_batch) + 1))}
        return held

    def __repr__(self) -> str:
        return f"SchedulePolicy({self.schedule.to_list()}, hold_steps={self.hold_steps})"


def _span(batch_range: tuple[int, int, int]) -> tuple[int, int]:
    """Smallest and largest batch size at which the range's k may be held."""
    first, last, _ = batch_range
    low = first - max(1, (first - 1) // BAND_DIVISOR) if first > 1 else 1
    return low, last + max(1, last // BAND_DIVISOR)
