"""T(batch, k): what a step costs, as measured or planned, for the policies and the simulator that weigh tokens against time.

A file is `{"schema": "stepgraph.profile/1", "rows": [{"batch", "k", "context", "step_ms"}, …]}`; `stepgraph profile` writes it,
with more beside the rows.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from stepgraph.capture.schedule import require_int, show

SCHEMA = "stepgraph.profile/1"
FIELDS = ("batch", "k", "context", "step_ms")
LARGEST = 1 << 40
LONGEST_MS = 1e12


class CostTable:
    """Step times by batch, k and context, linear between measured points.

    Beyond the largest measured batch or context the last two points are continued in a straight line (a single point stands
    for all); below the smallest its own time holds. Between two k that were measured, k that were not are an error: a graph
    that nobody timed is none to choose.

    Args:
        rows: `{"batch", "k", "context", "step_ms"}`; batch ≥ 1, k ≥ 0, context ≥ 0 in tokens, step_ms > 0. Each
            (batch, k, context) once.

    Raises:
        ValueError: a row is not that, or there is none.
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]]):
        if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
            raise ValueError(f"the cost table is {show(rows)}; it must be a list of rows.")
        points: dict[int, dict[int, dict[int, float]]] = {}
        self.rows: list[dict[str, Any]] = []
        for number, row in enumerate(rows):
            name = f"row {number} of the cost table"
            if not isinstance(row, Mapping) or any(field not in row for field in FIELDS):
                raise ValueError(f"{name} is {show(row)}; it must have {', '.join(FIELDS)}.")
            batch = require_int(f"batch in {name}", row["batch"], 1, LARGEST)
            k, context = (require_int(f"{field} in {name}", row[field], 0, LARGEST) for field in ("k", "context"))
            step_ms = row["step_ms"]
            # What cannot be a time or a size overflows where it meets others, long after it was read.
            if isinstance(step_ms, bool) or not isinstance(step_ms, int | float) or not 0 < step_ms <= LONGEST_MS:
                raise ValueError(f"step_ms in {name} is {show(step_ms)}; it must be a positive number up to {LONGEST_MS:g}.")
            batches = points.setdefault(k, {}).setdefault(context, {})
            if batch in batches:
                raise ValueError(f"{name} is the second for batch {batch}, k {k}, context {context}.")
            batches[batch] = float(step_ms)
            self.rows.append({"batch": batch, "k": k, "context": context, "step_ms": float(step_ms)})
        if not points:
            raise ValueError("the cost table has no rows.")
        self._lines = {
            k: sorted((context, sorted(batches.items())) for context, batches in contexts.items())
            for k, contexts in points.items()
        }
        self._known: dict[tuple[int, int, int], float] = {}

    @classmethod
    def load(cls, *paths: str | os.PathLike[str]) -> Self:
        """Read profiles, or plans (`stepgraph plan --json FILE`, of which the time of a FULL step counts); several, as of one
        k each, make one table.

        Raises:
            ValueError: a file cannot be read or is neither.
        """
        if wrong := [path for path in paths if not isinstance(path, str | os.PathLike)]:
            raise ValueError(f"a profile is {show(wrong[0])}; it must be the path of a file.")
        rows = [(Path(path).name, row) for path in paths for row in cls._rows_of(path)]
        try:
            return cls(row for _, row in rows)
        except ValueError as error:
            raise ValueError(f"profile {', '.join(dict.fromkeys(name for name, _ in rows))}: {error}") from None

    @staticmethod
    def _rows_of(path: str | os.PathLike[str]) -> list[Any]:
        name = Path(path).name
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"profile {name} cannot be read: {error}") from None
        if isinstance(content, dict) and isinstance(content.get("keys"), list) and "assumptions" in content:
            try:
                context = content["assumptions"]["context_tokens"]
                return [
                    {"batch": key["batch"], "k": key["k"], "context": context, "step_ms": key["modes"]["full_us"] / 1e3}
                    for key in content["keys"]
                ]
            except (KeyError, TypeError) as error:
                raise ValueError(f"plan {name} has no {error} for a key.") from None
        if not isinstance(content, dict) or content.get("schema") != SCHEMA or not isinstance(content.get("rows"), list):
            raise ValueError(f"profile {name} is not of schema {SCHEMA} with rows; stepgraph profile writes one.")
        return content["rows"]

    @property
    def ks(self) -> frozenset[int]:
        """Every k that was measured."""
        return frozenset(self._lines)

    def step_ms(self, batch: int, k: int, context: int | None = None) -> float:
        """Milliseconds of a step of `batch` requests with `k` drafts each.

        Args:
            batch: live requests, at least 1.
            k: one of `ks`.
            context: mean tokens of a request; None stands for the smallest context measured.

        Raises:
            ValueError: k was not measured, or batch < 1.
        """
        key = (batch, k, -1 if context is None else context)
        known = self._known.get(key)
        if known is None:
            # A cache of what a run asks for; a run that wanders through all contexts must not grow it for ever.
            if len(self._known) > 1 << 16:
                self._known.clear()
            known = self._known[key] = self._interpolated(batch, k, context)
        return known

    def _interpolated(self, batch: int, k: int, context: int | None) -> float:
        require_int("batch", batch, 1)
        if k not in self._lines:
            raise ValueError(f"k is {show(k)}; the cost table has {', '.join(map(str, sorted(self._lines)))}.")
        lines = self._lines[k]
        if context is None:
            return _line(lines[0][1], batch)
        return _line([(at, _line(batches, batch)) for at, batches in lines], context)


def _line(points: Sequence[tuple[int, float]], x: int) -> float:
    """Value at x of the line through ascending points; see `CostTable` for what lies outside."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    right = min(bisect_right(points, x, key=lambda point: point[0]), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    # Noise can make the last stretch fall; continued, it must not reach zero.
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), min(y0, y1) if x > x1 else 0.0)
