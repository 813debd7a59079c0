"""RMSNorm, alone and fused with the residual add before it.

rms_norm(x) = x / sqrt(mean(x²) + eps) * weight        (Zhang & Sennrich 2019)
"""

import torch
from torch import Tensor

from stepgraph.kernels.registry import register


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64, every smaller float type accumulates in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x [..., N]`, `weight [N]` -> `[..., N]` in x's dtype; statistics in float32 (float64 for float64 input)."""
    wide = x.to(accumulation_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both new tensors of x's shape and dtype."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


rms_norm = register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=rms_norm_reference,
    triton="stepgraph.kernels.norm_triton:rms_norm_triton",
    fake=lambda x, weight, eps: torch.empty_like(x),
)
add_rms_norm = register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    reference=add_rms_norm_reference,
    triton="stepgraph.kernels.norm_triton:add_rms_norm_triton",
    fake=lambda x, residual, weight, eps: (torch.empty_like(x), torch.empty_like(x)),
)
