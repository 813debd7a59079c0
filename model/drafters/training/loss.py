"""Soft cross-entropy over the draft vocabulary, with the target's law kept as its most likely tokens.

    loss = −Σ_{j in top} p_j log q_j,   q = softmax(lm_head x),   p renormalised over the top

The sum over all D tokens is only in log-sum-exp, so nothing of size rows × D is kept for the backward pass: the gradient
q − p is formed chunk by chunk while the logits are there.
"""

from typing import NamedTuple

import torch
from torch import Tensor

TOP = 32
CHUNK = 512  # rows whose logits exist at the same time


class Teacher(NamedTuple):
    """The target's law by row: `ids [N, top]` int64 in the draft vocabulary, the likeliest first; `probs [N, top]` float32."""

    ids: Tensor
    probs: Tensor


def teacher_of(hidden: Tensor, rows: Tensor, top: int = TOP) -> Teacher:
    """Law of the target restricted to the draft vocabulary: `hidden [N, H]`, `rows [D, H]` of its output matrix."""
    parts = []
    for chunk in hidden.split(CHUNK):
        logits, ids = (chunk @ rows.T).topk(min(top, rows.shape[0]), dim=-1)
        parts.append((ids, logits.float().softmax(-1)))
    ids, probs = zip(*parts, strict=True)
    return Teacher(torch.cat(ids), torch.cat(probs))


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, ids, probs):
        cast = weight.to(x.dtype)
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        loss, hits = torch.zeros((), device=x.device), torch.zeros((), dtype=torch.int64, device=x.device)
        for start in range(0, x.shape[0], CHUNK):
            at = slice(start, start + CHUNK)
            logits = (x[at] @ cast.T).float()
            hits += (logits.argmax(-1) == ids[at, 0]).sum()
            picked = logits.gather(-1, ids[at])
            normaliser = logits.logsumexp(-1, keepdim=True)
            loss += (normaliser[:, 0] - (probs[at] * picked).sum(-1)).sum()
            gradient = logits.sub_(normaliser).exp_().scatter_add_(-1, ids[at], -probs[at]).to(x.dtype)
            grad_x[at] = gradient @ cast
            if grad_weight is not None:
                grad_weight += (gradient.T @ x[at]).to(weight.dtype)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.mark_non_differentiable(hits)
        return loss, hits

    @staticmethod
    def backward(ctx, grad_loss, _):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_loss, None if grad_weight is None else grad_weight * grad_loss, None, None


def soft_cross_entropy(x: Tensor, weight: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor]:
    """Summed loss in nats (float32) and how often the likeliest token agrees with the teacher's, over `x [N, H]`.

    Args:
        x: normed outputs of the head.
        weight: `[D, H]`, its output matrix; gets a gradient where it asks for one.
        teacher: of the same N rows.
    """
    return _SoftCrossEntropy.apply(x, weight, *teacher)
