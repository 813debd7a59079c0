"""Triton SwiGLU activation; formula and contract in `stepgraph.kernels.activation`."""

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.activation import check_silu_mul
from stepgraph.kernels.launch import LaunchSpec, check_kernel_dtype, dense, launch

BLOCK = 1024


@triton.jit
def silu_mul_kernel(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr):
    """out = gate / (1 + exp(−gate)) * up, with silu(gate) rounded to the dtype as the reference does."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    up = tl.load(gate_up_ptr + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)  # [BLOCK]
    silu = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * width + columns, (silu * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul_triton(gate_up: Tensor) -> Tensor:
    """`gate_up [..., 2 I]` (gate first) -> `[..., I]`."""
    check_kernel_dtype("silu_mul", gate_up)
    check_silu_mul(gate_up)
    gate_up = dense(gate_up)
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    # One program per row and BLOCK columns.
    launch(
        LaunchSpec(
            kernel=silu_mul_kernel,
            grid=(gate_up.numel() // (2 * width), triton.cdiv(width, BLOCK)),
            args={"gate_up_ptr": gate_up, "out_ptr": out, "width": width},
            constexprs={"BLOCK": BLOCK},
            num_warps=4,
        )
    )
    return out
