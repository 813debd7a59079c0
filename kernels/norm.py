"""RMSNorm, alone and fused with the residual add before it.

rms_norm(x) = x / sqrt(mean(x²) + eps) * weight        (Zhang & Sennrich 2019)
"""

import torch
from torch import Tensor

from stepgraph.kernels.checks import check_tensor
from stepgraph.kernels.dtypes import accumulation_dtype
from stepgraph.kernels.registry import register


def _check_rows(op: str, x: Tensor) -> None:
    check_tensor(op, "x", x, (..., None))
    if x.shape[-1] == 0:
        raise ValueError(f"{op}: x is {list(x.shape)}; allowed is [..., N] with N ≥ 1")


def check_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """Raise a ValueError where `rms_norm` has no meaning."""
    _check_rows("rms_norm", x)
    check_tensor("rms_norm", "weight", weight, (x.shape[-1],), x.dtype)


def check_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Raise a ValueError where `add_rms_norm` has no meaning."""
    _check_rows("add_rms_norm", x)
    check_tensor("add_rms_norm", "residual", residual, tuple(x.shape), x.dtype)
    check_tensor("add_rms_norm", "weight", weight, (x.shape[-1],), x.dtype)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x [..., N]`, `weight [N]` of one dtype -> `[..., N]` in it; statistics in float32 (float64 for float64 input)."""
    x = x.contiguous()  # the order of a sum, hence its bits, would follow the strides
    wide = x.to(accumulation_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), both new tensors of x's shape and dtype."""
    total = (x + residual).contiguous()
    return rms_norm_reference(total, weight, eps), total


rms_norm = register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=rms_norm_reference,
    numba="stepgraph.kernels.norm_numba:rms_norm_numba",
    triton="stepgraph.kernels.norm_triton:rms_norm_triton",
    fake=lambda x, weight, eps: x.new_empty(x.shape),
    check=check_rms_norm,
)
add_rms_norm = register(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    reference=add_rms_norm_reference,
    numba="stepgraph.kernels.norm_numba:add_rms_norm_numba",
    triton="stepgraph.kernels.norm_triton:add_rms_norm_triton",
    fake=lambda x, residual, weight, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
    check=check_add_rms_norm,
)
