"""A step that was launched, until its results have been read."""

from dataclasses import dataclass

import numpy as np

from stepgraph.capture.keys import GraphKey
from stepgraph.capture.ledger import ACCEPTED, DRAFTED
from stepgraph.capture.request import Request
from stepgraph.capture.transfer import Download


@dataclass(frozen=True)
class StepRecord:
    """One finished step, for a log.

    Attributes:
        step: number of the step, from 0.
        batch: live rows.
        k_asked, k_run: what the policy asked for, and what ran.
        key: "4x3" for a graph of 4 rows at k = 3; None when the step ran operator by operator.
        reason: why it had no graph, None when it had one.
        padding: padding rows.
        requests, drafted, accepted: id and counts of each live row; rows whose request had ended before the step have none.
        lag: steps launched after this one before its results were read.
    """

    step: int
    batch: int
    k_asked: int
    k_run: int
    key: str | None
    reason: str | None
    padding: int
    requests: list[int]
    drafted: list[int]
    accepted: list[int]
    lag: int


class Rows:
    """The requests of a step, row by row; made once for as many steps as they stay the same.

    Attributes:
        requests, ids: of each row.
        slots: `[B]` int64.
        watched: rows whose tokens have to be looked at as they come.
    """

    def __init__(self, requests: list[Request]):
        self.requests, self.ids = requests, [request.id for request in requests]
        self.slots = np.array([request.slot for request in requests])
        self.watched = [row for row, request in enumerate(requests) if request.watched]


@dataclass(frozen=True)
class LaunchedStep:
    """A step in flight.

    Attributes:
        number: of the step, from 0.
        rows: its requests.
        k: of the step.
        key: of the graph that runs it, None when it ran operator by operator.
        reason: why it had no graph.
        results: its packed results, being fetched.
        logprobs: row → (position of the first value, values being fetched), for requests that want them.
    """

    number: int
    rows: Rows
    k: int
    key: GraphKey | None
    reason: str | None
    results: Download
    logprobs: dict[int, tuple[int, Download]]

    @property
    def most_tokens(self) -> int:
        """Most tokens it can commit to a request."""
        return self.k + 1

    def logprobs_of(self, row: int, seq_len: int, count: int) -> list[float]:
        """Log-probabilities of the `count` tokens that the step committed to a row; none where they are not wanted."""
        if row not in self.logprobs:
            return []
        first, fetched = self.logprobs[row]
        start = seq_len + 1 - count - first
        return fetched.wait().tolist()[start : start + count]

    def record(self, results: np.ndarray, took_part: list[int], lag: int) -> StepRecord:
        """`results [B, 5 + k + 1]` as they were read, and the numbers of the rows that committed anything."""
        batch = len(self.rows.requests)
        return StepRecord(
            step=self.number,
            batch=batch,
            k_asked=self.k,
            k_run=self.k if self.key is None else self.key.k,
            key=None if self.key is None else f"{self.key.batch}x{self.key.k}",
            reason=self.reason,
            padding=0 if self.key is None else self.key.batch - batch,
            requests=[self.rows.ids[row] for row in took_part],
            drafted=results[took_part, DRAFTED].tolist(),
            accepted=results[took_part, ACCEPTED].tolist(),
            lag=lag,
        )
