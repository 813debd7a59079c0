"""k on a ladder, up and down by the moving average of accepted drafts."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from stepgraph.capture.keys import MAX_BATCH, KeySet, reachable_keys
from stepgraph.capture.policies.adaptive import checked_ks, checked_number
from stepgraph.capture.policies.saved import saved_object
from stepgraph.capture.schedule import require_int, show


@dataclass(frozen=True)
class Rungs:
    """The ladder of one range of batch sizes.

    Attributes:
        ks: its rungs, ascending.
        up, down: hysteresis, added to the thresholds for rising and for dropping, in accepted drafts.
    """

    ks: tuple[int, ...]
    up: float = 0.0
    down: float = -0.25

    def __post_init__(self):
        object.__setattr__(self, "ks", checked_ks(self.ks))
        checked_number("up", self.up, -16, 16)
        checked_number("down", self.down, -16, 16)


# First batch size of each range → its ladder; SGLang's defaults (its ranges are "the closest", ours "from here on").
PUBLISHED: Mapping[int, Rungs] = {
    1: Rungs((1, 3, 5, 7), 0.0, -0.25),
    8: Rungs((0, 1, 3), 0.0, 0.0),
    32: Rungs((0, 1), 0.0, 0.0),
    64: Rungs((0,), 0.0, 0.0),
}


@dataclass
class _Slot:
    """State of one range: the rung it stands on, the average (None before any draft), rounds seen."""

    k: int
    average: float | None
    rounds: int = 0


class LadderPolicy:
    """The adaptive rule of SGLang (`adaptive_spec_params.py`, "adaptive speculative decoding" in its documentation).

        e ← (1 − ema) e + ema · mean accepted drafts        after each round that ran at the slot's k > 0
        after `warm_up` rounds, every `interval` rounds, with c the rung stood on and p the rung below:
          drop while e ≤ p − 0.5 + down   (p = 0: e ≤ 0.5 + down)
          else rise while e > c − 0.5 + up
          c = 0: rise to the next rung, which is the probe; e starts at that rung − 1 if there was never a draft

    Each range of batch sizes has a slot of its own. A round counts for the slot of its batch; one that ran at another k than
    the slot's (launched before a change) is left out, since its average says what another k allows.

    Args:
        slots: first batch size of a range → `Rungs`, or `{"ks": […], "up": …, "down": …}`; one must start at 1.
        initial_k: k to start at where a ladder has it; otherwise, and for None, its middle rung.
        ema: weight of the newest round, 0..1.
        interval: rounds between decisions.
        warm_up: rounds before the first.
    """

    kind = "ladder"

    def __init__(
        self,
        slots: Mapping[int | str, Rungs | Mapping[str, Any]] | None = None,
        *,
        initial_k: int | None = None,
        ema: float = 0.2,
        interval: int = 5,
        warm_up: int = 10,
    ):
        self.rungs = _checked_slots(PUBLISHED if slots is None else slots)
        self.initial_k = None if initial_k is None else require_int("initial_k", initial_k, 0)
        self.ema = checked_number("ema", ema, 0, 1)
        self.interval, self.warm_up = require_int("interval", interval, 1), require_int("warm_up", warm_up, 0)
        self._firsts = sorted(self.rungs)
        self._slots = {first: self._new_slot(self.rungs[first].ks) for first in self._firsts}

    @property
    def ks(self) -> frozenset[int]:
        return frozenset(k for rungs in self.rungs.values() for k in rungs.ks)

    def reachable(self, max_batch: int) -> set[tuple[int, int]]:
        require_int("max_batch", max_batch, 1, MAX_BATCH)
        return {(n, k) for n in range(1, max_batch + 1) for k in self.rungs[self._first(n)].ks}

    def keys(self, max_batch: int, rungs: Sequence[int] | None = None) -> KeySet:
        return reachable_keys(self.reachable(max_batch), max_batch, rungs)

    def choose(self, batch: int, context: int | None = None, requests: Sequence[int] | None = None) -> int:
        require_int("batch", batch, 1)
        return self._slots[self._first(batch)].k

    def observe(self, k_run: int, accepted: Sequence[int], lag: int = 0, requests: Sequence[int] | None = None) -> None:
        if not accepted:
            return
        first = self._first(len(accepted))
        slot, rungs = self._slots[first], self.rungs[first]
        if k_run != slot.k:
            return
        if slot.k > 0:
            mean = sum(accepted) / len(accepted)
            slot.average = slot.k - 1.0 if slot.average is None else slot.average
            slot.average += self.ema * (mean - slot.average)
        slot.rounds += 1
        if slot.rounds > self.warm_up and (slot.rounds - self.warm_up) % self.interval == 0:
            slot.k = self._decide(slot, rungs)

    def _decide(self, slot: _Slot, rungs: Rungs) -> int:
        ks, at = rungs.ks, rungs.ks.index(slot.k)
        if slot.k == 0:
            at = min(at + 1, len(ks) - 1)
            if slot.average is None and ks[at] > 0:
                slot.average = ks[at] - 1.0
            return ks[at]
        start = at
        while at > 0 and slot.average <= (0.5 if ks[at - 1] == 0 else ks[at - 1] - 0.5) + rungs.down:
            at -= 1
        if at == start:
            while at < len(ks) - 1 and slot.average > ks[at] - 0.5 + rungs.up:
                at += 1
        return ks[at]

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "slots": {str(first): asdict(rungs) for first, rungs in self.rungs.items()},
            "initial_k": self.initial_k,
            "ema": self.ema,
            "interval": self.interval,
            "warm_up": self.warm_up,
            "state": {str(first): asdict(slot) for first, slot in self._slots.items()},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        options = {name: data[name] for name in ("initial_k", "ema", "interval", "warm_up")}
        policy = cls(data["slots"], **options)
        states = saved_object("state", data["state"])
        if set(states) != set(map(str, policy._firsts)):
            raise ValueError(f"the saved state has slots {show(sorted(states))}; the ladder has {show(policy._firsts)}.")
        for first, ladder in policy.rungs.items():
            name, state = f"slot {first}", saved_object(f"slot {first}", states[str(first)])
            k, average = require_int(f"k of {name}", state["k"], 0), state["average"]
            if k not in ladder.ks:
                raise ValueError(f"k of {name} in the saved state is {k}; it must be one of {show(list(ladder.ks))}.")
            if average is not None:
                average = checked_number(f"average of {name} in the saved state", average, 0, ladder.ks[-1])
            elif k > 0:
                raise ValueError(f"average of {name} in the saved state is None; at k = {k} it must be a number.")
            policy._slots[first] = _Slot(k, average, require_int(f"rounds of {name}", state["rounds"], 0))
        return policy

    def _first(self, batch: int) -> int:
        return max(first for first in self._firsts if first <= batch)

    def _new_slot(self, ks: tuple[int, ...]) -> _Slot:
        k = self.initial_k if self.initial_k in ks else ks[len(ks) // 2]
        return _Slot(k, k - 1.0 if k > 0 else None)

    def __repr__(self) -> str:
        return f"LadderPolicy({ {first: list(rungs.ks) for first, rungs in self.rungs.items()} })"


def _checked_slots(slots: Mapping[int | str, Rungs | Mapping[str, Any]]) -> dict[int, Rungs]:
    if not isinstance(slots, Mapping):
        raise ValueError(f"slots is {show(slots)}; it must map first batch sizes to ladders.")
    names = {field.name for field in fields(Rungs)}
    checked = {}
    for first, rungs in slots.items():
        number = int(first) if isinstance(first, str) and first.isdecimal() and len(first) < 10 else first
        require_int("a first batch size in slots", number, 1)
        if not isinstance(rungs, Rungs):
            if not isinstance(rungs, Mapping) or "ks" not in rungs or set(rungs) - names:
                raise ValueError(f"slot {number} is {show(rungs)}; it must have ks, and may have up and down.")
            rungs = Rungs(**rungs)
        checked[number] = rungs
    if 1 not in checked:
        raise ValueError(f"slots start at {show(sorted(checked))}; one must start at batch size 1.")
    return dict(sorted(checked.items()))
