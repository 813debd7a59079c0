"""Triton matrix product of decode rows with a fixed tile, so that a row's bits do not depend on how many rows there are.

out = x Wᵀ + bias. A tile is BLOCK_M rows whatever M is, and the sum over K is cut at places that depend on the weight's shape
alone: SPLITS stretches of K, each summed in BLOCK_K steps, added in order by a second launch where there is more than one.
A weight is read once for up to BLOCK_M rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels import tables
from stepgraph.kernels.launch import LaunchSpec, check_kernel_dtype, dense, launch, target_of
from stepgraph.kernels.linear import check_linear
from stepgraph.kernels.registry import NoImplementation

BLOCK_M = 64  # rows of a tile; 16 for float32, which has no tensor cores here. Decides bits, hence a constant.
BLOCK_M_FLOAT32 = 16


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K]
    bias_ptr,  # [N] or None
    out_ptr,  # [M, N], or [SPLITS, M, N] float32 partial sums
    rows,
    width,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One tile [BLOCK_M, BLOCK_N] over depth [split · SPLIT_DEPTH, …)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    inner = tl.arange(0, BLOCK_K)
    live_row = row < rows
    live_column = column < width
    x_tile = x_ptr + row[:, None] * depth + inner[None, :]
    weight_tile = weight_ptr + column[:, None] * depth + inner[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    stop = tl.minimum(split * SPLIT_DEPTH + SPLIT_DEPTH, depth)
    for start in tl.range(split * SPLIT_DEPTH, stop, BLOCK_K, num_stages=NUM_STAGES):
        live_x, live_weight = live_row[:, None], live_column[:, None]
        if not EVEN_K:
            inside = (start + inner < depth)[None, :]
            live_x, live_weight = live_x & inside, live_weight & inside
        x = tl.load(x_tile + start, mask=live_x, other=0.0)  # [BLOCK_M, BLOCK_K]
        weight = tl.load(weight_tile + start, mask=live_weight, other=0.0)  # [BLOCK_N, BLOCK_K]
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if HAS_BIAS and SPLITS == 1:
        acc += tl.load(bias_ptr + column, mask=live_column, other=0.0).to(tl.float32)[None, :]
    target = (split.to(tl.int64) * rows + row)[:, None] * width + column[None, :]
    tl.store(out_ptr + target, acc.to(out_ptr.dtype.element_ty), mask=live_row[:, None] & live_column[None, :])


@triton.jit(do_not_specialize=["rows"])
def add_splits_kernel(
    partial_ptr,  # [SPLITS, M, N] float32
    bias_ptr,  # [N] or None
    out_ptr,  # [M, N]
    rows,
    width,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row × BLOCK columns: partial sums added in order, then the bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    acc = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(partial_ptr + (split * rows + row) * width + column, mask=inside, other=0.0)  # [BLOCK]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, acc.to(out_ptr.dtype.element_ty), mask=inside)


def linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    invariant: bool = True,
    scale: Tensor | None = None,
    *,
    config: dict | None = None,
) -> Tensor:
    """`x [..., K]`, `weight [N, K]`, `bias [N]` or None -> `[..., N]`; row-invariant whether or not that is asked for.

    `config` overrides the frozen table. A `scale`, of int8 weights, has no kernel.
    """
    check_linear(x, weight, bias, invariant, scale)
    if scale is not None:
        raise NoImplementation("linear has no Triton kernel for int8 weights")
    check_kernel_dtype("linear", x, weight, bias)
    if not weight.is_contiguous():
        raise ValueError(f"linear: the weight must be contiguous; strides are {weight.stride()}")
    width, depth = weight.shape
    x = dense(x)
    bias = None if bias is None else dense(bias)
    rows = x.numel() // depth
    config = config or tables.lookup(
        "linear",
        arch=target_of(x).arch,
        dtype=str(x.dtype).removeprefix("torch."),
        width=width,
        depth=depth,
        rows=rows,
    )
    block_m = BLOCK_M_FLOAT32 if x.dtype == torch.float32 else BLOCK_M
    tiles_n = triton.cdiv(width, config["block_n"])
    steps = triton.cdiv(depth, config["block_k"])
    # Enough programs to fill a device; a split keeps 4 steps at least, so that its partial sums stay small beside the weight.
    splits = max(1, min(config["programs"] // tiles_n, steps // 4, 16))
    split_depth = triton.cdiv(steps, splits) * config["block_k"]
    splits = triton.cdiv(depth, split_depth)

    out = x.new_empty((*x.shape[:-1], width))
    partial = out if splits == 1 else x.new_empty((splits, rows, width), dtype=torch.float32)
    # One program per tile of rows, tile of columns and stretch of K.
    launch(
        LaunchSpec(
            kernel=linear_kernel,
            grid=(triton.cdiv(rows, block_m), tiles_n, splits),
            args={
                "x_ptr": x,
                "weight_ptr": weight,
                "bias_ptr": bias,
                "out_ptr": partial,
                "rows": rows,
                "width": width,
                "depth": depth,
            },
            constexprs={
                "BLOCK_M": block_m,
                "BLOCK_N": config["block_n"],
                "BLOCK_K": config["block_k"],
                "SPLIT_DEPTH": split_depth,
                "SPLITS": splits,
                "EVEN_K": depth % config["block_k"] == 0,
                "HAS_BIAS": bias is not None,
                "NUM_STAGES": config["num_stages"],
            },
            num_warps=config["num_warps"],
            num_stages=config["num_stages"],
        )
    )
    if splits > 1:
        block = 256
        # One program per row and block of columns.
        launch(
            LaunchSpec(
                kernel=add_splits_kernel,
                grid=(rows, triton.cdiv(width, block)),
                args={"partial_ptr": partial, "bias_ptr": bias, "out_ptr": out, "rows": rows, "width": width},
                constexprs={"SPLITS": splits, "HAS_BIAS": bias is not None, "BLOCK": block},
                num_warps=2,
            )
        )
    return out
