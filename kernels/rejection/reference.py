"""The specification of lossless rejection sampling.

Drafts are accepted by the row's method (see `stepgraph.kernels.rejection.decide`). After a accepted drafts, fewer than there
are, one token comes from max(s p − q, 0), s = 1 in standard verification; after all of them, a bonus token comes from the next
row's p. A one-hot draft is the law q(d) = 1; where there is no draft (−1), the token comes from p. Temperature 0 is the
one-hot law, so greedy rows need no case of their own.
"""

import torch
from torch import Tensor

from stepgraph.kernels.philox import Stream, uniform
from stepgraph.kernels.rejection.decide import (
    Verify,
    block_count,
    block_scales,
    check_arguments,
    drafted_columns,
    standard_count,
    subtract_draft,
    synthetic_count,
)
from stepgraph.kernels.sampling import draw, needs_repair, token_law


def rejection_sample_reference(
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
    """Emitted tokens, the number of accepted drafts, and the number of rows of logits that had to be repaired.

    Args:
        logits: `[B, k+1, V]` target logits; row i follows draft i.
        draft_tokens: `[B, k]` int64; −1 for "no draft". From the first −1, or id that the target does not have, nothing
            counts as a draft.
        draft_law: `[B, k, V]`, the very laws the drafts were drawn from, or None when every draft is one-hot.
        temperature, top_k, top_p, min_p: `[B]`, see `token_law`.
        seed: `[B]` int64 request seeds.
        base: `[B]` int64, position of the last committed token; column i decides about position base + 1 + i.
        method: `[B]` int64 `Verify`; None is standard for all.
        rates: `[B, ≥ k]` float32, acceptance rates by position for synthetic rows; None when there are none.
        one_hot: `[B]` bool, rows whose drafts are one-hot although a law is given (a greedy drafter); None for no such row.
        d2t: `[D]` int64, target ids of a reduced draft vocabulary, each once; `draft_law` is then `[B, k, D]`. Draft tokens
            are always target ids.

    Returns:
        emitted `[B, k+1]` int64, padded with −1; accepted `[B]` int64; repaired `[B]` int64, how many of the rows that follow
        a draft (or the last token) held NaN, +inf or nothing but −inf.

    Raises:
        ValueError: a shape or a dtype that is not the one above.
    """
    check_arguments(logits, draft_tokens, draft_law, temperature, top_k, top_p, min_p, seed, base, method, rates, one_hot, d2t)
    batch, query_len, vocab = logits.shape
    k = query_len - 1

    def per_row(values: Tensor) -> Tensor:
        return values[:, None].expand(batch, query_len).reshape(-1)

    law = token_law(logits.flatten(0, 1), per_row(temperature), per_row(top_k), per_row(top_p), per_row(min_p))
    law = law.view(batch, query_len, vocab)
    if draft_law is not None and d2t is not None:
        draft_law = draft_law.new_zeros(batch, k, vocab).index_copy(-1, d2t, draft_law)

    column = torch.arange(query_len, device=logits.device)
    position = base[:, None] + 1 + column
    drafted = drafted_columns(draft_tokens, vocab)
    count = drafted.sum(-1)
    token = torch.where(drafted, draft_tokens, 0)
    repaired = (needs_repair(logits) & (column <= count[:, None])).sum(-1)

    p = law[:, :k].gather(-1, token[..., None])[..., 0]
    q = torch.ones_like(p)
    if draft_law is not None:
        q = draft_law.gather(-1, token[..., None])[..., 0].to(p.dtype)
        q = q if one_hot is None else torch.where(one_hot[:, None], 1.0, q)
    u = uniform(seed[:, None], position[:, :k], base[:, None], Stream.ACCEPT).to(p.dtype)
    accepted = standard_count(u, p, q, drafted)
    scales = torch.ones_like(law[:, :, 0])
    if method is not None and k > 0:
        block = method == Verify.BLOCK
        scales = torch.where(block[:, None], block_scales(p, q), scales)
        accepted = torch.where(block, block_count(u, scales, law, token, draft_law, one_hot, count), accepted)
        if rates is not None:
            accepted = torch.where(method == Verify.SYNTHETIC, synthetic_count(u, rates, drafted), accepted)

    row = accepted[:, None, None]
    p_next = law.gather(1, row.expand(batch, 1, vocab))
    weights = p_next[:, 0]
    if k > 0:
        # Column `accepted` holds the rejected draft, if there is one; past the last column or at "no draft", q is 0.
        refused = row.clamp(max=k - 1)
        q_next = None if draft_law is None else draft_law.gather(1, refused.expand(batch, 1, vocab))
        scaled = scales.gather(1, accepted[:, None])[..., None] * p_next
        left = subtract_draft(scaled, token.gather(1, refused[..., 0]), q_next, one_hot)[:, 0]
        from_residual = accepted < count
        if method is not None:
            from_residual = from_residual & (method != Verify.SYNTHETIC)
        # p and q can agree to the last bit where a rejection was decided by rounding: any token of p is then right.
        from_residual = from_residual & (left > 0).any(-1)
        weights = torch.where(from_residual[:, None], left, weights)
    final = draw(weights, seed, base + 1 + accepted, base, int(Stream.TARGET))

    emitted = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    emitted = torch.where(column < accepted[:, None], emitted, -1)
    return torch.where(column == accepted[:, None], final[:, None], emitted), accepted, repaired
