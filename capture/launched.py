"""A step that was launched, until its results have been read."""

from dataclasses import dataclass

from stepgraph.capture.keys import GraphKey
from stepgraph.capture.request import Request
from stepgraph.capture.state import StepResult, read_results
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


@dataclass(frozen=True)
class LaunchedStep:
    """A step in flight.

    Attributes:
        number: of the step, from 0.
        requests: row → request.
        k: of the step.
        key: of the graph that runs it, None when it ran operator by operator.
        reason: why it had no graph.
        results: its packed results, being fetched.
        logprobs: row → (position of the first value, values being fetched), for requests that want them.
    """

    number: int
    requests: list[Request]
    k: int
    key: GraphKey | None
    reason: str | None
    results: Download
    logprobs: dict[int, tuple[int, Download]]

    @property
    def most_tokens(self) -> int:
        """Most tokens it can commit to a request."""
        return self.k + 1

    def read(self) -> list[tuple[StepResult, list[float]]]:
        """Wait for the step; each row's result, and the log-probabilities of its tokens when they are wanted."""
        rows = []
        for row, result in enumerate(read_results(self.results, self.k)):
            logprobs = []
            if row in self.logprobs:
                first, fetched = self.logprobs[row]
                start = result.seq_len + 1 - len(result.tokens) - first
                logprobs = fetched.wait()[start : start + len(result.tokens)]
            rows.append((result, logprobs))
        return rows

    def record(self, results: list[StepResult], lag: int) -> StepRecord:
        rows = [(request, result) for request, result in zip(self.requests, results, strict=True) if result.tokens]
        batch = len(self.requests)
        return StepRecord(
            step=self.number,
            batch=batch,
            k_asked=self.k,
            k_run=self.k if self.key is None else self.key.k,
            key=None if self.key is None else f"{self.key.batch}x{self.key.k}",
            reason=self.reason,
            padding=0 if self.key is None else self.key.batch - batch,
            requests=[request.id for request, _ in rows],
            drafted=[result.drafted for _, result in rows],
            accepted=[result.accepted for _, result in rows],
            lag=lag,
        )
