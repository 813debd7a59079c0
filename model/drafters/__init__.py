"""Drafters, and the one place that reads a drafter's name."""

import re
from dataclasses import dataclass

from stepgraph.model.drafters.base import Drafter, Proposal, StepRows, draw_draft
from stepgraph.model.drafters.draft_model import DraftModelDrafter
from stepgraph.model.drafters.early_exit import EarlyExitDrafter
from stepgraph.model.drafters.ngram import NgramDrafter
from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.transformer import Transformer

__all__ = [
    "DraftModelDrafter",
    "Drafter",
    "DrafterSpec",
    "EarlyExitDrafter",
    "NgramDrafter",
    "Proposal",
    "StepRows",
    "draw_draft",
    "make_drafter",
]

KNOWN = "none, ngram, ngram:MIN-MAX, early-exit:N, draft-model:NAME_OR_PATH"


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter's name, read. `kind` is none, ngram, early-exit or draft-model.

    Attributes:
        kind: which drafter.
        matches: ngram: shortest and longest suffix looked for.
        num_layers: early-exit: layers that draft.
        model: draft-model: name or path.
    """

    kind: str
    matches: tuple[int, int] = (2, 4)
    num_layers: int = 0
    model: str = ""

    @classmethod
    def parse(cls, spec: str) -> "DrafterSpec":
        """Read one of `KNOWN`; a ValueError for anything else."""
        kind, _, option = spec.partition(":")
        if spec in ("none", "ngram"):
            return cls(spec)
        if kind == "ngram" and (match := re.fullmatch(r"([0-9]{1,3})-([0-9]{1,3})", option)):
            low, high = map(int, match.groups())
            if 1 <= low <= high:
                return cls(kind, matches=(low, high))
        elif kind == "early-exit" and re.fullmatch(r"[0-9]{1,4}", option):
            return cls(kind, num_layers=int(option))
        elif kind == "draft-model" and option:
            return cls(kind, model=option)
        raise ValueError(f"drafter is {spec!r}; known are {KNOWN}")


def make_drafter(spec: DrafterSpec, target: Transformer, kv: PagedKV, draft_model: Transformer | None = None) -> Drafter | None:
    """The drafter that `spec` describes; None for "none".

    Args:
        spec: see `DrafterSpec.parse`.
        target, kv: the target model and its cache.
        draft_model: what `spec.model` names, in the target's dtype and on its device.

    Raises:
        ValueError: an option that does not fit the target.
    """
    if spec.kind == "ngram":
        return NgramDrafter(*spec.matches)
    if spec.kind == "early-exit":
        return EarlyExitDrafter(target, kv, spec.num_layers)
    if spec.kind == "draft-model":
        return _draft_model(spec.model, target, kv, draft_model)
    return None


def _draft_model(name: str, target: Transformer, kv: PagedKV, model: Transformer) -> DraftModelDrafter:
    draft_vocab, vocab = model.config.vocab_size, target.config.vocab_size
    if draft_vocab != vocab:
        raise ValueError(f"draft model {name!r} has a vocabulary of {draft_vocab} tokens, the target one of {vocab}")
    own_kv = PagedKV(model.config, num_blocks=kv.num_blocks, block_size=kv.block_size, dtype=model.dtype, device=model.device)
    return DraftModelDrafter(model, own_kv, name)
