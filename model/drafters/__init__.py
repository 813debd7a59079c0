"""Drafters, and the one place that turns a drafter's name into one."""

from collections.abc import Callable

from stepgraph.model.drafters.base import Drafter, Proposal, StepRows, draw_draft
from stepgraph.model.drafters.draft_model import DraftModelDrafter
from stepgraph.model.drafters.early_exit import EarlyExitDrafter
from stepgraph.model.drafters.ngram import NgramDrafter
from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.transformer import Transformer

__all__ = [
    "DraftModelDrafter",
    "Drafter",
    "EarlyExitDrafter",
    "NgramDrafter",
    "Proposal",
    "StepRows",
    "draw_draft",
    "make_drafter",
]

KNOWN = "none, ngram, ngram:MIN-MAX, early-exit:N, draft-model:NAME_OR_PATH"


def make_drafter(spec: str, target: Transformer, kv: PagedKV, load_model: Callable[[str], Transformer]) -> Drafter | None:
    """The drafter that `spec` names; None for "none".

    Args:
        spec: one of `KNOWN`.
        target, kv: the target model and its cache.
        load_model: loads a draft model by name or path, in the target's dtype and on its device.

    Raises:
        ValueError: unknown name, or an option that does not fit the target.
    """
    kind, _, option = spec.partition(":")
    if spec == "none":
        return None
    if kind == "ngram":
        low, dash, high = option.partition("-")
        if not option:
            return NgramDrafter()
        if dash and low.isdigit() and high.isdigit():
            return NgramDrafter(int(low), int(high))
    elif kind == "early-exit" and option.isdigit():
        return EarlyExitDrafter(target, kv, int(option))
    elif kind == "draft-model" and option:
        return _draft_model(option, target, kv, load_model(option))
    raise ValueError(f"drafter is {spec!r}; known are {KNOWN}")


def _draft_model(name: str, target: Transformer, kv: PagedKV, model: Transformer) -> DraftModelDrafter:
    draft_vocab, vocab = model.config.vocab_size, target.config.vocab_size
    if draft_vocab != vocab:
        raise ValueError(f"draft model {name!r} has a vocabulary of {draft_vocab} tokens, the target one of {vocab}")
    own_kv = PagedKV(model.config, num_blocks=kv.num_blocks, block_size=kv.block_size, dtype=model.dtype, device=model.device)
    return DraftModelDrafter(model, own_kv, name)
