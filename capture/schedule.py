"""Which k each batch size runs at: the schedule `[[first, last, k], …]`.

Meaning and JSON are those of vLLM's `num_speculative_tokens_per_batch_size` (vLLM PR 32374): ranges are inclusive, and
batch sizes in a gap or after the last range carry the previous k forward. Where vLLM converts or clamps in silence
(`int(3.9)`, k above `num_speculative_tokens`, unsorted entries), this reader refuses with one sentence, because a typing
error in a schedule changes speed, never tokens, and so nobody would see it.
"""

import json
import os
import reprlib
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
DEFAULT_MAX_K = 16
# A profile, with its schedule inside, fits; anything larger is the wrong file.
MAX_BYTES = 1 << 20


class ScheduleError(ValueError):
    """A schedule that cannot be used; the message names the entry, the value and what is allowed."""


def show(value: object) -> str:
    """A short `repr` of untrusted input (Python refuses to print integers of thousands of digits)."""
    try:
        return reprlib.repr(value)
    except ValueError:
        return f"an enormous {type(value).__name__}"


def require_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """Return `value` when it is an integer (not a bool) in `low..high`.

    Raises:
        ValueError: one sentence with the name, the value and the allowed range.
    """
    if type(value) is not int or value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name} is {show(value)}; it must be an integer {allowed}.")
    return value


def json_object(option: str, text: str | None) -> dict | None:
    """The object that an option gives as JSON text; None of None.

    Raises:
        ValueError: it is not JSON, or no object.
    """
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{option} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{option} is {show(value)}; it must be an object of names and values")
    return value


@dataclass(frozen=True)
class Schedule:
    """A strict batch-size → k table.

    Attributes:
        entries: `(first, last, k)` in batch sizes and draft tokens, as written: sorted, without overlaps, the first starts
            at 1.
        max_k: largest k allowed, in draft tokens; not part of equality.

    Raises:
        ScheduleError: for any entry that is not exactly as above.
    """

    entries: tuple[tuple[int, int, int], ...]
    max_k: int = field(default=DEFAULT_MAX_K, compare=False)

    def __post_init__(self) -> None:
        require_int("max_k", self.max_k, 0)
        object.__setattr__(self, "entries", _checked_entries(self.entries, self.max_k))

    @classmethod
    def fixed(cls, k: int, max_k: int = DEFAULT_MAX_K) -> "Schedule":
        """The same k for every batch size."""
        return cls(((1, 1, k),), max_k)

    @classmethod
    def parse(cls, value: Any, max_k: int = DEFAULT_MAX_K) -> "Schedule":
        """Read a schedule from JSON-able data.

        Args:
            value: `[[first, last, k], …]`, or a `speculative_config` object that holds such a list under
                `num_speculative_tokens_per_batch_size` (also inside `{"speculative_config": …}`). The object's own
                `num_speculative_tokens` lowers the limit on k, as it sizes the buffers there.
            max_k: largest k allowed, in draft tokens.
        """
        if isinstance(value, Schedule):
            return cls(value.entries, max_k)
        if isinstance(value, dict):
            if SCHEDULE_KEY not in value and isinstance(value.get("speculative_config"), dict):
                value = value["speculative_config"]
            if SCHEDULE_KEY not in value:
                raise ScheduleError(f"the speculative config {show(value)} has no {SCHEDULE_KEY!r} list.")
            if value.get("num_speculative_tokens") is not None:
                try:
                    max_k = min(max_k, require_int("num_speculative_tokens", value["num_speculative_tokens"], 0))
                except ValueError as error:
                    raise ScheduleError(str(error)) from None
            value = value[SCHEDULE_KEY]
        return cls(value, max_k)

    @classmethod
    def load(cls, text_or_path: str | os.PathLike[str], max_k: int = DEFAULT_MAX_K) -> "Schedule":
        """Read a schedule from JSON text (starting with `[` or `{`) or from the path of a JSON file."""
        if not isinstance(text_or_path, str | os.PathLike):
            raise ScheduleError(f"a schedule is JSON text or a path, not {show(text_or_path)}.")
        text = os.fspath(text_or_path)
        inline = isinstance(text_or_path, str) and text.lstrip()[:1] in ("[", "{")
        name = "the schedule" if inline else f"the schedule file {show(text)}"
        if not inline:
            text = _read(Path(text), name)
        if len(text) > MAX_BYTES:
            raise ScheduleError(f"{name} is larger than the {MAX_BYTES} bytes a schedule may have.")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise ScheduleError(f"{name} is not valid JSON: {reason}.") from None
        return cls.parse(value, max_k)

    def k_for(self, batch: int) -> int:
        """Draft tokens for a step of `batch` decoding requests (prefilling ones do not count)."""
        require_int("batch", batch, 1)
        return self.entries[bisect_right(self.entries, batch, key=lambda entry: entry[0]) - 1][2]

    def ranges(self, max_batch: int) -> tuple[tuple[int, int, int], ...]:
        """`(first, last, k)` that tile 1..max_batch: gaps and tail filled, neighbours of equal k merged."""
        require_int("max_batch", max_batch, 1)
        starts = [(first, k) for first, _, k in self.entries if first <= max_batch]
        starts = [starts[i] for i in range(len(starts)) if i == 0 or starts[i][1] != starts[i - 1][1]]
        lasts = [first - 1 for first, _ in starts[1:]] + [max_batch]
        return tuple((first, last, k) for (first, k), last in zip(starts, lasts, strict=True))

    def ks(self, max_batch: int | None = None) -> frozenset[int]:
        """The distinct k, of the whole schedule or of batch sizes up to `max_batch`."""
        entries = self.entries if max_batch is None else self.ranges(max_batch)
        return frozenset(k for _, _, k in entries)

    def to_list(self) -> list[list[int]]:
        """`[[first, last, k], …]`; `parse` reads it back."""
        return [list(entry) for entry in self.entries]

    def to_json(self) -> str:
        """JSON text that `load` reads back, and that vLLM accepts."""
        return json.dumps(self.to_list())


def _read(path: Path, name: str) -> str:
    try:
        # A pipe or a device could block or never end, so only regular files are opened.
        if not path.is_file():
            problem = "is not a regular file" if path.exists() else "does not exist"
            raise ScheduleError(f"{name} {problem}; give JSON like '[[1, 4, 5], [5, 64, 3]]' or the path of a file with it.")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ScheduleError(f"{name} is larger than the {MAX_BYTES} bytes a schedule may have.")
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ScheduleError(f"{name} is not UTF-8 text.") from None
    except OSError as error:
        raise ScheduleError(f"{name} cannot be read: {error.strerror or error}.") from None


def _checked_entries(entries: object, max_k: int) -> tuple[tuple[int, int, int], ...]:
    if not isinstance(entries, list | tuple) or not entries:
        raise ScheduleError(f"a schedule is {show(entries)}; it must be a non-empty list of [first, last, k].")
    checked: list[tuple[int, int, int]] = []
    for position, entry in enumerate(entries, start=1):
        name = f"schedule entry {position} ({show(entry)})"
        if not isinstance(entry, list | tuple) or len(entry) != 3:
            raise ScheduleError(f"{name} must be a list of three integers, [first, last, k].")
        try:
            first = require_int(f"{name}: first", entry[0], 1)
            last = require_int(f"{name}: last", entry[1], 1)
            k = require_int(f"{name}: k", entry[2], 0, max_k)
        except ValueError as error:
            raise ScheduleError(str(error)) from None
        if first > last:
            raise ScheduleError(f"{name}: first is {first}; it must be at most last, {last}.")
        if not checked and first != 1:
            raise ScheduleError(f"{name}: first is {first}; the first range must start at batch size 1.")
        if checked and first <= checked[-1][1]:
            raise ScheduleError(
                f"{name}: first is {first}; ranges must be sorted and not overlap, so it must be above {checked[-1][1]}."
            )
        checked.append((first, last, k))
    return tuple(checked)
