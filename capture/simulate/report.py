"""What a serving run reports, simulated or real, with the denominator each figure needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class ServingRun:
    """A run of requests through a server.

    Attributes:
        name: of what chose k.
        requests, tokens: finished, and emitted by them.
        elapsed_ms: from the first arrival to the last token.
        decode_ms: spent in decoding steps.
        steps, request_steps: decoding steps, and live rows of all of them.
        switches: changes of k from one step to the next.
        steps_at_k: steps by k.
        ttft_ms: `[requests]`, from arrival to the first token.
        tpot_ms: time per further token of the requests that have more than one.
    """

    name: str
    requests: int
    tokens: int
    elapsed_ms: float
    decode_ms: float
    steps: int
    request_steps: int
    switches: int
    steps_at_k: dict[int, int]
    ttft_ms: np.ndarray
    tpot_ms: np.ndarray

    @property
    def tokens_per_busy_ms(self) -> float:
        """Tokens per millisecond of decoding: what a choice of k can change, at any load."""
        return self.tokens / self.decode_ms if self.decode_ms else 0.0

    def regret(self, best: "ServingRun") -> float:
        """Share of the tokens per busy millisecond of `best` that this run does not reach."""
        return 1 - self.tokens_per_busy_ms / best.tokens_per_busy_ms

    def report(self) -> dict:
        """Figures for a table or JSON; None where there is nothing to divide by."""
        return {
            "name": self.name,
            "requests": self.requests,
            "tokens": self.tokens,
            "elapsed_s": self.elapsed_ms / 1e3,
            "tokens_per_s": self.tokens / self.elapsed_ms * 1e3 if self.elapsed_ms else None,
            "tokens_per_busy_s": self.tokens_per_busy_ms * 1e3,
            "ttft_ms": percentiles(self.ttft_ms),
            "tpot_ms": percentiles(self.tpot_ms),
            "steps": self.steps,
            "mean_batch": self.request_steps / self.steps if self.steps else None,
            "acceptance_length": self.tokens / self.request_steps if self.request_steps else None,
            "switches": self.switches,
            "steps_at_k": {str(k): n for k, n in sorted(self.steps_at_k.items())},
        }


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float] | None:
    """`{"p50": …, "p90": …, "p99": …}`, None of nothing."""
    if len(values) == 0:
        return None
    return {f"p{q}": float(value) for q, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


def count_switches(ks: Sequence[int]) -> int:
    """Changes from one step to the next."""
    steps = np.asarray(ks)
    return int((steps[1:] != steps[:-1]).sum())
