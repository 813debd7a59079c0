"""Rejection sampling on the CPU: greedy rows cost an arg-max, and methods that no row uses cost nothing."""

import torch
from torch import Tensor

from stepgraph.kernels.rejection.decide import Verify, check_arguments, drafted_columns
from stepgraph.kernels.rejection.reference import rejection_sample_reference
from stepgraph.kernels.sampling_cpu import greedy_tokens_cpu


def rejection_sample_cpu(
    logits: Tensor,
    draft_tokens: Tensor,
    draft_law: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    base: Tensor,
    method: Tensor | None = None,
    rates: Tensor | None = None,
    one_hot: Tensor | None = None,
    d2t: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Same contract as `rejection_sample_reference`, and a ValueError for a d2t that leaves the target's vocabulary."""
    check_arguments(logits, draft_tokens, draft_law, temperature, top_k, top_p, min_p, seed, base, method, rates, one_hot, d2t)
    if d2t is not None and len(wrong := d2t[(d2t < 0) | (d2t >= logits.shape[2])]):
        raise ValueError(f"rejection_sample: d2t has {int(wrong[0])}; allowed are ids from 0 to {logits.shape[2] - 1}")
    synthetic = method is not None and bool((method == Verify.SYNTHETIC).any())
    if bool((temperature <= 0).all()) and not synthetic:
        return _all_greedy(logits, draft_tokens)
    if method is not None and not method.any():
        method = None
    if not synthetic:
        rates = None
    if one_hot is not None and not one_hot.any():
        one_hot = None
    return rejection_sample_reference(
        logits, draft_tokens, draft_law, temperature, top_k, top_p, min_p, seed, base, method, rates, one_hot, d2t
    )


def _all_greedy(logits: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every method accepts the drafts that are the arg-max, and the arg-max follows."""
    best, broken = greedy_tokens_cpu(logits)
    k = draft_tokens.shape[1]
    drafted = drafted_columns(draft_tokens, logits.shape[2])
    accepted = (drafted & (draft_tokens == best[:, :k])).to(torch.int64).cumprod(-1).sum(-1)
    column = torch.arange(k + 1)
    repaired = (broken & (column <= drafted.sum(-1, keepdim=True))).sum(-1)
    return torch.where(column <= accepted[:, None], best, -1), accepted, repaired
