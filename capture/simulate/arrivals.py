"""When requests come, and how long they are."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepgraph.capture.policies.adaptive import checked_number
from stepgraph.capture.schedule import require_int, show

# Of bursts: all are drawn, so a period far below the time between two requests would take for ever.
MOST_PERIODS = 10**6
COLUMNS = ("timestamp", "prompt_tokens", "output_tokens")


@dataclass(frozen=True)
class Arrivals:
    """Requests in order of arrival.

    Attributes:
        at_ms: `[N]` float64, from 0, ascending.
        prompt, output: `[N]` int64 tokens, at least 1 each.
    """

    at_ms: np.ndarray
    prompt: np.ndarray
    output: np.ndarray

    def __len__(self) -> int:
        return len(self.at_ms)


def poisson(rng: np.random.Generator, requests: int, per_s: float, prompt: int, output: int) -> Arrivals:
    """Independent arrivals, `per_s` a second; lengths are geometric with the given means."""
    checked_number("the rate of arrivals", per_s, 1e-9, 1e9)
    gaps_ms = rng.exponential(1e3 / per_s, requests)
    return _with_lengths(rng, gaps_ms.cumsum(), prompt, output)


def bursty(
    rng: np.random.Generator, requests: int, per_s: float, factor: float, period_s: float, prompt: int, output: int
) -> Arrivals:
    """Poisson arrivals whose rate is `factor` times as high in bursts as between them; mean rate `per_s`.

    Bursts and quiet times follow each other, each exponential with mean `period_s` / 2.
    """
    checked_number("the rate of arrivals", per_s, 1e-9, 1e9)
    checked_number("the factor of bursts", factor, 1, 1e6)
    checked_number("the period of bursts", period_s, 1e-6, 1e9)
    if requests > MOST_PERIODS * per_s * period_s:
        raise ValueError(
            f"bursts every {period_s:g} s at {per_s:g} requests a second make more than {MOST_PERIODS} periods for {requests} "
            "requests; give a longer period or a higher rate"
        )
    quiet_per_ms = 2 * per_s / (1 + factor) / 1e3
    # Arrivals of a unit rate, mapped through the inverse of the summed rate, which is a line within each phase.
    wanted, phases = rng.exponential(1, requests).cumsum(), []
    starts, sums = [0.0], [0.0]
    while sums[-1] < wanted[-1]:
        length = rng.exponential(period_s * 1e3 / 2)
        rate = quiet_per_ms * (factor if len(phases) % 2 else 1.0)
        phases.append(rate)
        starts.append(starts[-1] + length)
        sums.append(sums[-1] + length * rate)
    return _with_lengths(rng, np.interp(wanted, sums, starts), prompt, output)


def read_arrivals(path: str | Path) -> Arrivals:
    """Read a CSV file with columns `timestamp` (seconds), `prompt_tokens`, `output_tokens`, in any order of rows.

    Raises:
        ValueError: it cannot be read, a column is missing, or a value is not a number that can be; names the line.
    """
    name = Path(path).name
    rows = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            if missing := [column for column in COLUMNS if column not in (reader.fieldnames or [])]:
                raise ValueError(f"arrivals file {name} has no column {missing[0]}; it needs {', '.join(COLUMNS)}.")
            for row in reader:
                try:
                    at_s = checked_number("timestamp", _read(row, "timestamp", float), -1e15, 1e15)
                    tokens = [require_int(column, _read(row, column, int), 1, 1 << 24) for column in COLUMNS[1:]]
                except (TypeError, ValueError) as error:
                    raise ValueError(f"arrivals file {name}, line {reader.line_num}: {error}") from None
                rows.append((at_s, *tokens))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"arrivals file {name} cannot be read: {error}") from None
    if not rows:
        raise ValueError(f"arrivals file {name} has no requests.")
    at_s, prompt, output = zip(*sorted(rows, key=lambda row: row[0]), strict=True)
    at_ms = (np.array(at_s) - at_s[0]) * 1e3
    return Arrivals(at_ms, np.array(prompt, dtype=np.int64), np.array(output, dtype=np.int64))


def _read(row: dict[str, str], column: str, kind: Callable[[str], float]) -> float:
    try:
        return kind(row[column])
    except (TypeError, ValueError):
        raise ValueError(f"{column} is {row[column]!r}; it must be a{'n integer' if kind is int else ' number'}") from None


def parse_arrivals(text: str, rng: np.random.Generator, requests: int, prompt: int, output: int) -> Arrivals:
    """`poisson:PER_S`, `bursty:PER_S:FACTOR:PERIOD_S` or `csv:FILE`.

    Raises:
        ValueError: anything else.
    """
    kind, _, rest = text.partition(":")
    for name, value in (("requests", requests), ("prompt tokens", prompt), ("output tokens", output)):
        require_int(name, value, 1, 1 << 24)
    if kind == "csv" and rest:
        return read_arrivals(rest)
    try:
        numbers = [float(part) for part in rest.split(":")]
    except ValueError:
        numbers = []
    if kind == "poisson" and len(numbers) == 1:
        return poisson(rng, requests, *numbers, prompt, output)
    if kind == "bursty" and len(numbers) == 3:
        return bursty(rng, requests, *numbers, prompt, output)
    raise ValueError(f"arrivals is {show(text)}; allowed are closed, poisson:PER_S, bursty:PER_S:FACTOR:PERIOD_S and csv:FILE")


def _with_lengths(rng: np.random.Generator, at_ms: np.ndarray, prompt: int, output: int) -> Arrivals:
    lengths = [rng.geometric(1 / mean, len(at_ms)) for mean in (prompt, output)]
    return Arrivals(at_ms - at_ms[0], *lengths)
