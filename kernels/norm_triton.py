"""Triton RMSNorm, with or without the residual add in front; formula and contract in `stepgraph.kernels.norm`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.launch import LaunchSpec, check_kernel_dtype, dense, launch
from stepgraph.kernels.norm import check_add_rms_norm, check_rms_norm

MAX_WIDTH = 65_536  # a row is held in registers


@triton.jit
def rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, width, eps, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr
):
    """out = t / sqrt(mean(t²) + eps) * weight with t = x (+ residual, rounded to x's dtype, and stored)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
        total = (x + residual).to(x_ptr.dtype.element_ty)
        tl.store(total_ptr + row * width + columns, total, mask=inside)
        x = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    normed = (x * inverse).to(x_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    tl.store(out_ptr + row * width + columns, (normed * weight).to(out_ptr.dtype.element_ty), mask=inside)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    op = "rms_norm" if residual is None else "add_rms_norm"
    check_kernel_dtype(op, x, residual, weight)
    width = x.shape[-1]
    if width > MAX_WIDTH:
        raise ValueError(f"{op}: rows of {width} elements; the kernel holds a row in registers, {MAX_WIDTH} at most")
    x = dense(x)
    out = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    # One program per row.
    launch(
        LaunchSpec(
            kernel=rms_norm_kernel,
            grid=(x.numel() // width,),
            args={
                "x_ptr": x,
                "residual_ptr": None if residual is None else dense(residual),
                "weight_ptr": dense(weight),
                "out_ptr": out,
                "total_ptr": total,
                "width": width,
                "eps": eps,
            },
            constexprs={"HAS_RESIDUAL": residual is not None, "BLOCK": block},
            num_warps=min(max(block // 512, 1), 16),
        )
    )
    return out, total


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x [..., N]`, `weight [N]` -> `[..., N]` in x's dtype."""
    check_rms_norm(x, weight, eps)
    return _launch(x, None, weight, eps)[0]


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) in one launch."""
    check_add_rms_norm(x, residual, weight, eps)
    return _launch(x, residual, weight, eps)
