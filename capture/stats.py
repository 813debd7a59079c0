"""What an engine counts, with the denominator each figure needs."""

from dataclasses import dataclass, field

from stepgraph.capture.request import RequestOutput


def acceptance_by_position(drafted_at: list[int], accepted_at: list[int]) -> list[float]:
    """Share of the drafts proposed at each position that were accepted. Position j is divided by the steps that drafted
    that far, not by all steps; positions never drafted are left out.
    """
    return [accepted / drafted for drafted, accepted in zip(drafted_at, accepted_at, strict=True) if drafted]


@dataclass
class Mean:
    """A mean that forgets what went into it: an engine may serve for months."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        """Take in a value; None is none."""
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class EngineStats:
    """Totals over the finished requests of an engine.

    A *request-step* is one request taking part in one step; acceptance length, drafted and accepted per step are means over
    request-steps, and are reported together, since each alone can mislead.
    """

    k_max: int
    steps: int = 0  # engine steps that decoded
    request_steps: int = 0
    tokens: int = 0
    requests: int = 0
    repaired: int = 0  # rows of logits that were not finite
    elapsed_s: float = 0.0  # wall time of engine steps, prefill included
    prefill_s: float = 0.0  # of these, until prompts are launched; on a GPU they may still run
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    ttft_ms: Mean = field(default_factory=Mean)
    tpot_ms: Mean = field(default_factory=Mean)

    def __post_init__(self):
        self.drafted_at = self.drafted_at or [0] * self.k_max
        self.accepted_at = self.accepted_at or [0] * self.k_max

    def add(self, output: RequestOutput) -> None:
        self.requests += 1
        self.repaired += output.repaired
        self.request_steps += output.steps
        self.tokens += len(output.token_ids)
        self.drafted_at = [a + b for a, b in zip(self.drafted_at, output.drafted_at, strict=True)]
        self.accepted_at = [a + b for a, b in zip(self.accepted_at, output.accepted_at, strict=True)]
        self.ttft_ms.add(output.ttft_ms)
        self.tpot_ms.add(output.tpot_ms)

    def report(self) -> dict:
        """Figures for a table or JSON; None where there is nothing to divide by."""

        def per_request_step(count: int) -> float | None:
            return count / self.request_steps if self.request_steps else None

        return {
            "requests": self.requests,
            "steps": self.steps,
            "request_steps": self.request_steps,
            "tokens": self.tokens,
            "repaired_rows": self.repaired,
            "acceptance_length": per_request_step(self.tokens),
            "drafted_per_step": per_request_step(sum(self.drafted_at)),
            "accepted_per_step": per_request_step(sum(self.accepted_at)),
            "per_position_acceptance": acceptance_by_position(self.drafted_at, self.accepted_at),
            "ttft_ms": self.ttft_ms.value,
            "tpot_ms": self.tpot_ms.value,
            "tokens_per_s": self.tokens / self.elapsed_s if self.elapsed_s else None,
        }
