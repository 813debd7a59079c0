"""Prompt look-up: no model at all, the proposal is what followed the last time the same words occurred."""

from stepgraph.kernels.ngram import ngram_propose
from stepgraph.model.drafters.base import Drafter, Proposal, StepRows


class NgramDrafter(Drafter):
    """Longest suffix of `min_match` to `max_match` tokens, latest occurrence; its law is one-hot."""

    name = "ngram"

    def __init__(self, min_match: int = 2, max_match: int = 4):
        super().__init__()
        if not 1 <= min_match <= max_match:
            raise ValueError(f"min_match={min_match}, max_match={max_match}; 1 ≤ min_match ≤ max_match is needed")
        self.min_match, self.max_match = min_match, max_match

    def propose(self, rows: StepRows, k: int) -> Proposal:
        tokens = ngram_propose(rows.history, rows.slots, rows.seq_len, k, self.min_match, self.max_match)
        return Proposal(tokens, None)
