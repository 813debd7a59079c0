"""How many drafts are accepted, by each method, and what is left of the target's law after that many.

standard (Leviathan et al. 2023): draft i stands when u_i q(d_i) < p(d_i); the first that does not ends the run.

block (Sun et al. 2024): with s_0 = 1, s_i = min(s_{i−1} p(d_i) / q(d_i), 1) and R_i = Σ_x max(s_i p_{i+1}(x) − q_{i+1}(x), 0),
draft i < n passes when u_i (R_i + 1 − s_i) < R_i, the last draft n when u_n < s_n; the run ends at the last draft that
passes, whatever became of those before it. It needs numbers that no later step uses again, which the counter's base gives.

synthetic: draft i stands when u_i is below the rate given for its position. For timing only: it is not lossless.
"""

from enum import IntEnum

import torch
from torch import Tensor

from stepgraph.kernels.checks import check_rows, check_tensor


class Verify(IntEnum):
    """How a request's drafts are verified; a number per row, so that it shapes no graph."""

    STANDARD = 0
    BLOCK = 1
    SYNTHETIC = 2


def check_arguments(
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
) -> None:
    """Raise a ValueError where `rejection_sample` has no meaning. Reads shapes and dtypes, no values."""
    op = "rejection_sample"
    check_tensor(op, "logits", logits, (None, None, None))
    batch, k, vocab = logits.shape[0], logits.shape[1] - 1, logits.shape[2]
    if k < 0 or vocab == 0:
        raise ValueError(f"{op}: logits is {list(logits.shape)}; allowed is [B, k + 1, V] with k ≥ 0 and V ≥ 1")
    check_tensor(op, "draft_tokens", draft_tokens, (batch, k), torch.int64)
    check_rows(op, batch, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, base=base)
    if method is not None:
        check_rows(op, batch, method=method)
    if rates is not None:
        check_tensor(op, "rates", rates, (batch, None))
        if rates.shape[1] < k:
            raise ValueError(f"{op}: rates has {rates.shape[1]} columns; allowed are {k} or more, one for each draft")
    if one_hot is not None:
        check_tensor(op, "one_hot", one_hot, (batch,), torch.bool)
    if d2t is not None:
        check_tensor(op, "d2t", d2t, (None,), torch.int64)
    if draft_law is not None:
        check_tensor(op, "draft_law", draft_law, (batch, k, vocab if d2t is None else d2t.shape[0]))


def drafted_columns(draft_tokens: Tensor, vocab: int) -> Tensor:
    """`[B, k]` bool: columns before the first that holds no id of the target's vocabulary (−1 for "no draft")."""
    return ((draft_tokens >= 0) & (draft_tokens < vocab)).to(torch.int64).cumprod(-1) > 0


def subtract_draft(weights: Tensor, token: Tensor, law: Tensor | None, one_hot: Tensor | None) -> Tensor:
    """max(weights − q, 0).

    Args:
        weights: `[B, n, V]`.
        token: `[B, n]` int64 ≥ 0, the drafts; the law of a one-hot draft is 1 there.
        law: `[B, n, V]`, or None when every draft is one-hot.
        one_hot: `[B]` bool, rows whose drafts are one-hot although there is a law, or None for no such row.
    """
    if law is None or one_hot is not None:
        ones = torch.ones((), dtype=weights.dtype, device=weights.device).expand(*token.shape, 1)
        hot = weights.scatter_add(-1, token[..., None], -ones).clamp(min=0)
        if law is None:
            return hot
    # Where q is NaN nothing is left: neither version of `max` can be relied on there.
    soft = torch.where(weights > law, weights - law, 0.0)
    return soft if one_hot is None else torch.where(one_hot[:, None, None], hot, soft)


def standard_count(u: Tensor, p: Tensor, q: Tensor, drafted: Tensor) -> Tensor:
    """Accepted drafts `[B]` from numbers, probabilities and flags `[B, k]`; nothing counts from the first undrafted one on."""
    return (drafted & (u * q < p)).to(torch.int64).cumprod(-1).sum(-1)


def synthetic_count(u: Tensor, rates: Tensor, drafted: Tensor) -> Tensor:
    """Accepted drafts `[B]`, by the rates `[B, ≥ k]` of acceptance at each position after acceptance before it."""
    return (drafted & (u < rates[:, : u.shape[1]].to(u.dtype))).to(torch.int64).cumprod(-1).sum(-1)


def block_scales(p: Tensor, q: Tensor) -> Tensor:
    """`[B, k+1]`: s_0 = 1, s_i = min(s_{i−1} p_i / q_i, 1)."""
    scales = [torch.ones_like(p[:, 0])]
    for i in range(p.shape[1]):
        # A draft with q = 0 cannot have been drawn; it stands or falls with p, as in standard verification.
        ratio = torch.where(q[:, i] > 0, p[:, i] / q[:, i], torch.where(p[:, i] > 0, torch.inf, 0.0))
        scales.append(torch.where(ratio.isinf(), torch.ones_like(ratio), scales[-1] * ratio).clamp(max=1))
    return torch.stack(scales, 1)


def block_count(
    u: Tensor,
    scales: Tensor,
    law: Tensor,
    draft_tokens: Tensor,
    draft_law: Tensor | None,
    one_hot: Tensor | None,
    count: Tensor,
) -> Tensor:
    """Accepted drafts `[B]`.

    Args:
        u: `[B, k]`.
        scales: `[B, k+1]` from `block_scales`.
        law: `[B, k+1, V]`, the target's.
        draft_tokens, draft_law, one_hot: as in `subtract_draft`.
        count: `[B]` int64, drafts there are.
    """
    k = u.shape[1]
    index = torch.arange(1, k + 1, device=u.device)  # draft i of the formula
    inner = scales[:, 1:k, None] * law[:, 1:k]
    left = subtract_draft(inner, draft_tokens[:, 1:], None if draft_law is None else draft_law[:, 1:], one_hot)
    # One by one, so that the bits do not depend on how many rows and threads there are; `sum` splits a single row's terms.
    left = left.cumsum(-1)[..., -1]
    left = torch.nn.functional.pad(left, (0, 1))
    scale, last = scales[:, 1:], index == count[:, None]
    below = torch.where(last, u < scale, u * (left + 1 - scale) < left)
    return torch.where(below & (index <= count[:, None]), index, 0).amax(-1)
