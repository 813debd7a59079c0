"""Drafters, and the one place that makes them."""

from pathlib import Path

from stepgraph.model.checkpoint import load_model
from stepgraph.model.checkpoint.shipped import has_shipped_head, shipped_head
from stepgraph.model.drafters.base import Drafter, PromptChunk, Proposal, StepRows, Verified, draw_draft
from stepgraph.model.drafters.draft_model import DraftModelDrafter
from stepgraph.model.drafters.eagle3 import Eagle3Drafter
from stepgraph.model.drafters.early_exit import EarlyExitDrafter
from stepgraph.model.drafters.early_stop import EarlyStop
from stepgraph.model.drafters.hybrid import HybridDrafter
from stepgraph.model.drafters.ngram import NgramDrafter
from stepgraph.model.drafters.spec import DrafterSpec
from stepgraph.model.eagle3_head import Eagle3Head
from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.transformer import Transformer

__all__ = [
    "DraftModelDrafter",
    "Drafter",
    "DrafterSpec",
    "Eagle3Drafter",
    "EarlyExitDrafter",
    "EarlyStop",
    "HybridDrafter",
    "NgramDrafter",
    "PromptChunk",
    "Proposal",
    "StepRows",
    "Verified",
    "default_drafter",
    "draw_draft",
    "load_draft_weights",
    "make_drafter",
]


def default_drafter(target_name: str) -> str:
    """The name of the drafter that is taken where none is given: with a head shipped for the target, that head and the
    look-up in its stead where the text repeats itself; otherwise the look-up alone.
    """
    return "hybrid" if has_shipped_head(target_name) else "ngram"


def load_draft_weights(spec: DrafterSpec, target: Transformer, target_name: str = "") -> Transformer | Eagle3Head | None:
    """The weights that a drafter brings along, in the target's dtype and on its device; None for one without any.

    Args:
        spec: see `DrafterSpec.parse`.
        target: the model to draft for.
        target_name: its name, by which a shipped head is found.

    Raises:
        CheckpointError: (a ValueError) what the spec names is missing, damaged, or made for another target.
    """
    spec = spec.modelled
    if spec.kind == "draft-model":
        options = {"dtype": target.dtype, "device": target.device, "invariant_linear": target.invariant_linear}
        return load_model(spec.model, **options).model
    if spec.kind == "eagle3":
        # Imported here: safetensors is needed for nothing else by a run with other drafters.
        from stepgraph.model.checkpoint.eagle3 import load_eagle3, random_eagle3

        if spec.head == "random":
            return random_eagle3(target)
        return load_eagle3(Path(spec.head).expanduser() if spec.head else shipped_head(target_name), target)
    return None


def make_drafter(
    spec: DrafterSpec,
    target: Transformer,
    kv: PagedKV,
    weights: Transformer | Eagle3Head | None = None,
    num_slots: int = 0,
    early_stop: EarlyStop | None = None,
) -> Drafter | None:
    """The drafter that `spec` describes; None for "none".

    Args:
        spec: see `DrafterSpec.parse`.
        target, kv: the target model and its cache.
        weights: of `load_draft_weights`.
        num_slots: requests that the state can hold, for drafters that keep something by slot.
        early_stop: when a row stops drafting; for drafters that run a model.

    Raises:
        ValueError: an option that does not fit the target.
    """
    if early_stop is not None and spec.kind in ("none", "ngram"):
        raise ValueError(f"early_stop needs a drafter that runs a model; drafter is {spec.kind!r}")
    if spec.kind == "none":
        return None
    if spec.kind == "ngram":
        return NgramDrafter(*spec.matches)
    if spec.other is not None:
        other = make_drafter(spec.other, target, kv, weights, num_slots, early_stop)
        return HybridDrafter(NgramDrafter(*spec.matches), other)
    if spec.kind == "early-exit":
        drafter = EarlyExitDrafter(target, kv, spec.num_layers)
    elif spec.kind == "draft-model":
        drafter = _draft_model(spec.model, target, kv, weights)
    else:
        name = f"eagle3:{spec.head}" if spec.head else "eagle3"
        drafter = Eagle3Drafter(weights, target, _own_kv(weights, kv), num_slots, name)
    drafter.early_stop = early_stop
    return drafter


def _own_kv(weights: Transformer | Eagle3Head, kv: PagedKV) -> PagedKV:
    """A cache behind the same block tables as the target's `kv`."""
    return PagedKV(
        weights.config, num_blocks=kv.num_blocks, block_size=kv.block_size, dtype=weights.dtype, device=weights.device
    )


def _draft_model(name: str, target: Transformer, kv: PagedKV, model: Transformer) -> DraftModelDrafter:
    draft_vocab, vocab = model.config.vocab_size, target.config.vocab_size
    if draft_vocab != vocab:
        raise ValueError(f"draft model {name!r} has a vocabulary of {draft_vocab} tokens, the target one of {vocab}")
    return DraftModelDrafter(model, _own_kv(model, kv), name)
