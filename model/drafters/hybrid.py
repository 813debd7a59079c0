"""Look-up where the text repeats itself, a model where it does not: row by row, in one fixed shape."""

import torch

from stepgraph.model.drafters.base import Drafter, PromptChunk, Proposal, StepRows, Verified
from stepgraph.model.drafters.ngram import NgramDrafter


class HybridDrafter(Drafter):
    """Takes the look-up's proposal in rows whose last tokens occurred before, `other`'s in all others.

    A match of at least `lookup.min_match` tokens decides. Which of the two drafts a row depends on its committed tokens alone,
    so either law is the law its drafts were drawn from: one-hot, or `other`'s. `other` drafts and observes every row, so that
    shapes are fixed and its own state never misses a token.

    Args:
        lookup: the look-up.
        other: a drafter with a law, whose state comes from verified rows and not from what it proposed (a draft model's does).
    """

    def __init__(self, lookup: NgramDrafter, other: Drafter):
        super().__init__()
        self.lookup, self.other = lookup, other
        self.name = f"hybrid:{lookup.min_match}:{other.name}"
        self.max_positions, self.feature_layers = other.max_positions, other.feature_layers
        self.early_stop = other.early_stop
        self.capture_support = min(lookup.capture_support, other.capture_support)

    def propose(self, rows: StepRows, k: int) -> Proposal:
        found, drafted = self.lookup.propose(rows, k).tokens, self.other.propose(rows, k)
        hit = found[:, 0] >= 0
        one_hot = hit if drafted.one_hot is None else hit | drafted.one_hot
        return drafted._replace(tokens=torch.where(hit[:, None], found, drafted.tokens), one_hot=one_hot)

    def observe(self, rows: StepRows, k: int, verified: Verified) -> None:
        self.other.observe(rows, k, verified)

    def prefill(self, chunk: PromptChunk) -> None:
        self.other.prefill(chunk)
