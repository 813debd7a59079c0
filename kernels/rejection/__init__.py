"""Lossless rejection sampling of draft tokens against the target's law."""

import torch

from stepgraph.kernels.registry import register
from stepgraph.kernels.rejection.cpu import rejection_sample_cpu
from stepgraph.kernels.rejection.decide import Verify, check_arguments
from stepgraph.kernels.rejection.reference import rejection_sample_reference

__all__ = ["Verify", "rejection_sample", "rejection_sample_reference"]


def _fake(logits, *arguments, **options):
    check_arguments(logits, *arguments, **options)
    batch, query_len = logits.shape[:2]
    return tuple(
        torch.empty(shape, dtype=torch.int64, device=logits.device) for shape in ((batch, query_len), (batch,), (batch,))
    )


rejection_sample = register(
    "rejection_sample(Tensor logits, Tensor draft_tokens, Tensor? draft_law, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor min_p, Tensor seed, Tensor base, Tensor? method=None, Tensor? rates=None, Tensor? one_hot=None, "
    "Tensor? d2t=None) -> (Tensor, Tensor, Tensor)",
    reference=rejection_sample_reference,
    cpu=rejection_sample_cpu,
    triton="stepgraph.kernels.rejection.launcher:rejection_sample_triton",
    fake=_fake,
)
