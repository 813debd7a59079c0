"""Triton head norms, RoPE and paged KV write in one launch; formula and contract in `stepgraph.kernels.rope_kv`."""

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.launch import LaunchSpec, check_blocks, check_kernel_dtype, dense, launch
from stepgraph.kernels.rope_kv import check_rope_kv_write

FP8_MAX = tl.constexpr(448.0)  # largest finite e4m3


@triton.jit
def _head_norm(first, second, weight_ptr, is_mine, columns, in_half, eps, HEAD_DIM: tl.constexpr):
    """RMSNorm of each head (a row of [first, second]) where `is_mine`, rounded to the weight's dtype as the reference does."""
    dtype = weight_ptr.dtype.element_ty
    inverse = tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / HEAD_DIM + eps)[:, None]
    weight_first = tl.load(weight_ptr + columns, mask=in_half, other=0.0).to(tl.float32)  # [HALF_PAD]
    weight_second = tl.load(weight_ptr + HEAD_DIM // 2 + columns, mask=in_half, other=0.0).to(tl.float32)  # [HALF_PAD]
    normed_first = ((first * inverse).to(dtype).to(tl.float32) * weight_first[None, :]).to(dtype).to(tl.float32)
    normed_second = ((second * inverse).to(dtype).to(tl.float32) * weight_second[None, :]).to(dtype).to(tl.float32)
    return tl.where(is_mine, normed_first, first), tl.where(is_mine, normed_second, second)


@triton.jit
def _to_cache(values, scales_ptr, scale_index, valid, IS_FP8: tl.constexpr, dtype: tl.constexpr):
    """Values as the cache holds them: cast, or for fp8 divided by their head's scale and clamped to the finite range."""
    if IS_FP8:
        scale = tl.load(scales_ptr + scale_index, mask=valid, other=1.0)[:, None]
        values = tl.minimum(tl.maximum(values / scale, -FP8_MAX), FP8_MAX)
    return values.to(dtype)


@triton.jit(do_not_specialize=["max_position"])
def rope_kv_write_kernel(
    qkv_ptr,  # [T, (H + 2 KV) D]
    positions_ptr,  # [T]
    rope_ptr,  # [P, D], cos then sin
    kv_slots_ptr,  # [T]
    k_ptr,  # [slots, KV, D]
    v_ptr,
    q_norm_ptr,  # [D] or None
    k_norm_ptr,
    scales_ptr,  # [2, KV] or None
    out_ptr,  # [T, H, D]
    max_position,
    k_block_stride,
    v_block_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """One token × HEAD_TILE heads of the fused projection: [x1, x2] -> [x1 cos − x2 sin, x2 cos + x1 sin] for q and k."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    columns = tl.arange(0, HALF_PAD)
    in_half = columns < HALF

    source = token * (HEADS + 2 * KV_HEADS) * HEAD_DIM + head[:, None] * HEAD_DIM + columns[None, :]
    loaded = (head < HEADS + 2 * KV_HEADS)[:, None] & in_half[None, :]
    first = tl.load(qkv_ptr + source, mask=loaded, other=0.0).to(tl.float32)  # [HEAD_TILE, HALF_PAD]
    second = tl.load(qkv_ptr + source + HALF, mask=loaded, other=0.0).to(tl.float32)

    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    if HAS_Q_NORM:
        first, second = _head_norm(first, second, q_norm_ptr, is_q[:, None], columns, in_half, eps, HEAD_DIM)
    if HAS_K_NORM:
        first, second = _head_norm(first, second, k_norm_ptr, is_k[:, None], columns, in_half, eps, HEAD_DIM)

    position = tl.load(positions_ptr + token).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), max_position)
    cos = tl.load(rope_ptr + position * HEAD_DIM + columns, mask=in_half, other=0.0)[None, :]  # [1, HALF_PAD]
    sin = tl.load(rope_ptr + position * HEAD_DIM + HALF + columns, mask=in_half, other=0.0)[None, :]
    rotated_first = first * cos - second * sin
    rotated_second = second * cos + first * sin

    target = token * HEADS * HEAD_DIM + head[:, None] * HEAD_DIM + columns[None, :]
    mask = is_q[:, None] & in_half[None, :]
    tl.store(out_ptr + target, rotated_first.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptr + target + HALF, rotated_second.to(out_ptr.dtype.element_ty), mask=mask)

    slot = tl.load(kv_slots_ptr + token).to(tl.int64)
    block, lane = tl.maximum(slot, 0) // BLOCK_SIZE, tl.maximum(slot, 0) % BLOCK_SIZE
    dtype = k_ptr.dtype.element_ty

    k_head = head - HEADS
    target = block * k_block_stride + lane * (KV_HEADS * HEAD_DIM) + k_head[:, None] * HEAD_DIM + columns[None, :]
    mask = (tl.where(is_k, slot, -1) >= 0)[:, None] & in_half[None, :]
    tl.store(k_ptr + target, _to_cache(rotated_first, scales_ptr, k_head, is_k, IS_FP8, dtype), mask=mask)
    tl.store(k_ptr + target + HALF, _to_cache(rotated_second, scales_ptr, k_head, is_k, IS_FP8, dtype), mask=mask)

    v_head = head - HEADS - KV_HEADS
    target = block * v_block_stride + lane * (KV_HEADS * HEAD_DIM) + v_head[:, None] * HEAD_DIM + columns[None, :]
    mask = (tl.where(is_v, slot, -1) >= 0)[:, None] & in_half[None, :]
    tl.store(v_ptr + target, _to_cache(first, scales_ptr, KV_HEADS + v_head, is_v, IS_FP8, dtype), mask=mask)
    tl.store(v_ptr + target + HALF, _to_cache(second, scales_ptr, KV_HEADS + v_head, is_v, IS_FP8, dtype), mask=mask)


def rope_kv_write_triton(
    qkv: Tensor,
    positions: Tensor,
    rope: Tensor,
    kv_slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    num_heads: int,
    eps: float,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Same contract as `rope_kv_write_reference`."""
    check_kernel_dtype("rope_kv_write", qkv, q_norm, k_norm)
    check_rope_kv_write(qkv, positions, rope, kv_slots, k_cache, v_cache, q_norm, k_norm, num_heads, eps, kv_scales)
    check_blocks("rope_kv_write", k_cache=k_cache, v_cache=v_cache)
    block_size, kv_heads, head_dim = k_cache.shape[1:]
    is_fp8 = k_cache.dtype.itemsize == 1
    batch, query_len = qkv.shape[:2]
    out = qkv.new_empty((batch, query_len, num_heads, head_dim))
    half_pad = triton.next_power_of_2(head_dim // 2)
    head_tile = max(1, 512 // half_pad)
    # One program per token and head_tile heads of q, k and v.
    launch(
        LaunchSpec(
            kernel=rope_kv_write_kernel,
            grid=(batch * query_len, triton.cdiv(num_heads + 2 * kv_heads, head_tile)),
            args={
                "qkv_ptr": dense(qkv),
                "positions_ptr": positions.contiguous(),
                "rope_ptr": dense(rope),
                "kv_slots_ptr": kv_slots.contiguous(),
                "k_ptr": k_cache,
                "v_ptr": v_cache,
                "q_norm_ptr": None if q_norm is None else dense(q_norm),
                "k_norm_ptr": None if k_norm is None else dense(k_norm),
                "scales_ptr": dense(kv_scales) if is_fp8 else None,
                "out_ptr": out,
                "max_position": rope.shape[0] - 1,
                "k_block_stride": k_cache.stride(0),
                "v_block_stride": v_cache.stride(0),
                "eps": eps,
            },
            constexprs={
                "HEADS": num_heads,
                "KV_HEADS": kv_heads,
                "HEAD_DIM": head_dim,
                "HALF_PAD": half_pad,
                "BLOCK_SIZE": block_size,
                "HEAD_TILE": head_tile,
                "HAS_Q_NORM": q_norm is not None,
                "HAS_K_NORM": k_norm is not None,
                "IS_FP8": is_fp8,
            },
            num_warps=4,
        )
    )
    return out
