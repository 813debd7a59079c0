"""Stopping a draft early, row by row, in a step whose shape does not change: from the stop on a row has "no draft".

The decision at a position looks at the drafter's logits there, before its draft is drawn, and so depends on the text and the
drafts before it alone. Given those, the draft that is kept was drawn from its law, whatever was decided; hence standard
verification stays lossless position by position. Block verification does too: its acceptance h at a position is built
backwards from the positions after it so that a prefix survives with its ratio min(1, Π p/q), and a prefix at which every
draft stops is a last position of the block, for which that holds as it stands (`stepgraph.kernels.rejection`).
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

KNOWN = "confidence:THRESHOLD, entropy:THRESHOLD, entropy:THRESHOLD:GAMMA"
DEFAULT_GAMMA = 0.2


@dataclass(frozen=True)
class EarlyStop:
    """A row drafts on while the drafter is sure enough.

        confidence: max_x softmax(logits)(x) ≥ threshold
        entropy:    1 − √(γ H(softmax(logits))) ≥ threshold      (H in nats)

    The second is the lower bound on the chance of acceptance of AdaEDL (Agrawal et al. 2024). Both use temperature 1, for
    greedy rows too.

    Attributes:
        kind: "confidence" or "entropy".
        threshold: 0..1; 0 stops nothing under "confidence".
        gamma: γ ≥ 0.
    """

    kind: str
    threshold: float
    gamma: float = DEFAULT_GAMMA

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read one of `KNOWN`; a ValueError for anything else."""
        kind, *numbers = text.split(":")
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        most = {"confidence": 1, "entropy": 2}.get(kind, 0)
        if not 1 <= len(values) <= most or not 0 <= values[0] <= 1 or not all(0 <= value < 1e6 for value in values):
            raise ValueError(f"early_stop is {text!r}; allowed are {KNOWN}, with a threshold from 0 to 1")
        return cls(kind, *values)

    def keeps(self, logits: Tensor) -> Tensor:
        """`[B]` bool: the rows of `logits [B, V]` that draft here."""
        log_law = logits.float().log_softmax(-1)
        if self.kind == "confidence":
            return log_law.amax(-1).exp() >= self.threshold
        # 0 log 0 is 0, and logits may be −inf.
        entropy = -(log_law.exp() * log_law.clamp(min=-1e4)).sum(-1)
        return 1 - (self.gamma * entropy).sqrt() >= self.threshold
