"""The specification of lossless rejection sampling (Leviathan et al. 2023, Chen et al. 2023).

Draft d with law q is accepted when u·q(d) < p(d), u uniform in [0, 1). The first rejection is replaced by a token from
max(p − q, 0); when every draft is accepted, a bonus token comes from the next row's p. A one-hot draft is the law q(d) = 1;
where there is no draft (−1), the token comes from p. Temperature 0 is the one-hot law, so greedy rows need no case of their
own.
"""

import torch
from torch import Tensor

from stepgraph.kernels.philox import Stream, uniform
from stepgraph.kernels.sampling import draw, token_law


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
) -> tuple[Tensor, Tensor]:
    """Emitted tokens and the number of accepted drafts.

    Args:
        logits: `[B, k+1, V]` target logits; row i follows draft i.
        draft_tokens: `[B, k]` int64; −1 for "no draft" (from the first −1 on, nothing counts as a draft).
        draft_law: `[B, k, V]`, the very laws the drafts were drawn from, or None when every draft is one-hot.
        temperature, top_k, top_p, min_p: `[B]`, see `token_law`.
        seed: `[B]` int64 request seeds.
        base: `[B]` int64, position of the last committed token; column i decides about position base + 1 + i.

    Returns:
        emitted `[B, k+1]` int64, padded with −1, and accepted `[B]` int64.
    """
    batch, query_len, vocab = logits.shape
    k = query_len - 1

    def per_row(values: Tensor) -> Tensor:
        return values[:, None].expand(batch, query_len).reshape(-1)

    law = token_law(logits.flatten(0, 1), per_row(temperature), per_row(top_k), per_row(top_p), per_row(min_p))
    law = law.view(batch, query_len, vocab)

    column = torch.arange(query_len, device=logits.device)
    position = base[:, None] + 1 + column
    drafted = draft_tokens >= 0
    token = draft_tokens.clamp(min=0)[..., None]
    p = law[:, :k].gather(-1, token)[..., 0]
    q = torch.ones_like(p) if draft_law is None else draft_law.gather(-1, token)[..., 0]
    u = uniform(seed[:, None], position[:, :k], base[:, None], Stream.ACCEPT).to(p.dtype)
    accepted = (drafted & (u * q < p)).to(torch.int64).cumprod(-1).sum(-1)

    row = accepted[:, None, None]
    p_next = law.gather(1, row.expand(batch, 1, vocab))[:, 0]
    weights = p_next
    if k > 0:
        # Column `accepted` holds the rejected draft, if there is one; past the last column or at "no draft", q is 0.
        refused = row.clamp(max=k - 1)
        refused_token = token.gather(1, refused)[:, 0]
        if draft_law is None:
            q_next = torch.zeros_like(p_next).scatter(-1, refused_token, 1.0)
        else:
            q_next = draft_law.gather(1, refused.expand(batch, 1, vocab))[:, 0]
        was_draft = (accepted < k)[:, None] & drafted.gather(1, refused[..., 0])
        residual = torch.where(was_draft, p_next - q_next, p_next).clamp(min=0)
        # p and q can agree to the last bit where a rejection was decided by rounding: any token of p is then right.
        weights = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_next)
    final = draw(weights, seed, base + 1 + accepted, base, int(Stream.TARGET))

    emitted = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    emitted = torch.where(column < accepted[:, None], emitted, -1)
    return torch.where(column == accepted[:, None], final[:, None], emitted), accepted
