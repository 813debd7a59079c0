"""Lossless rejection sampling of draft tokens against the target's law."""

import torch

from stepgraph.kernels.registry import register
from stepgraph.kernels.rejection.reference import rejection_sample_reference

__all__ = ["rejection_sample", "rejection_sample_reference"]


def _fake(logits, draft_tokens, draft_law, temperature, top_k, top_p, min_p, seed, base):
    return (
        torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device),
        torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device),
    )


rejection_sample = register(
    "rejection_sample(Tensor logits, Tensor draft_tokens, Tensor? draft_law, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor min_p, Tensor seed, Tensor base) -> (Tensor, Tensor)",
    reference=rejection_sample_reference,
    fake=_fake,
)
