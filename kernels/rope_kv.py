"""Split the fused q, k, v projection, normalise q and k where the family does, rotate them, write k and v to the paged cache.

rotate(x) = [x1 cos − x2 sin, x2 cos + x1 sin],  x1, x2 the two halves of a head  (Su et al. 2021, half-split layout)
"""

import torch
from torch import Tensor

from stepgraph.kernels.checks import INDEX, check_cache, check_tensor
from stepgraph.kernels.dtypes import accumulation_dtype
from stepgraph.kernels.norm import rms_norm_reference
from stepgraph.kernels.registry import register


def rotate_reference(x: Tensor, positions: Tensor, rope: Tensor) -> Tensor:
    """`x [B, Q, heads, D]` rotated at `positions [B, Q]`; `rope [P, D]` holds cos then sin. Positions are clamped to P."""
    cos, sin = rope[positions.clamp(0, rope.shape[0] - 1)].unsqueeze(2).chunk(2, dim=-1)
    first, second = x.to(accumulation_dtype(x.dtype)).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def to_cache_dtype(values: Tensor, dtype: torch.dtype, scales: Tensor | None) -> Tensor:
    """`values [..., KV, D]` as a cache of `dtype` holds them; fp8: divided by `scales [KV]`, clamped to its finite range."""
    if dtype.itemsize > 1:
        return values.to(dtype)
    if scales is None:
        raise ValueError(f"a KV cache of {dtype} needs kv_scales [2, KV]")
    limit = torch.finfo(dtype).max
    return (values.to(torch.float32) / scales[:, None]).clamp(-limit, limit).to(dtype)


def write_kv_reference(cache: Tensor, values: Tensor, kv_slots: Tensor, scales: Tensor | None = None) -> None:
    """Write `values [B, Q, KV, D]` into `cache [blocks, block_size, KV, D]` at `kv_slots [B, Q]`; −1 writes nothing.

    Unwritten rows are sent to slot 0 of the null block (block 0) carrying what that slot holds already, so that the op has a
    fixed shape and the null block keeps its (finite) contents.
    """
    flat = cache.view(-1, *cache.shape[2:])
    slots = kv_slots.reshape(-1).to(torch.int64)
    values = to_cache_dtype(values.reshape(-1, *cache.shape[2:]), cache.dtype, scales)
    if cache.dtype.itemsize == 1:
        flat, values = flat.view(torch.uint8), values.view(torch.uint8)  # indexing has no fp8
    written = (slots >= 0)[:, None, None]
    target = slots.clamp(min=0)
    flat.index_copy_(0, target, torch.where(written, values, flat[0]))


def _require_contiguous(**caches: Tensor) -> None:
    """Raise a ValueError before anything is written; the kernel, which takes blocks that lie apart, does not ask."""
    for name, cache in caches.items():
        if not cache.is_contiguous():
            raise ValueError(f"rope_kv_write: {name} must be contiguous; strides are {cache.stride()}")


def require_slots(largest: int, num_slots: int) -> None:
    """A ValueError for a slot that a cache of `num_slots` does not have."""
    if largest >= num_slots:
        raise ValueError(f"rope_kv_write: kv_slots has {largest}; allowed are slots up to {num_slots - 1}, and -1")


def check_rope_kv_write(
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
) -> None:
    """Raise a ValueError where `rope_kv_write` has no meaning."""
    op = "rope_kv_write"
    check_cache(op, k_cache, v_cache, kv_scales)
    kv_heads, head_dim = k_cache.shape[2:]
    if head_dim % 2:
        raise ValueError(f"{op}: k_cache has heads of {head_dim}; allowed are even head dims, whose halves are rotated")
    check_tensor(op, "qkv", qkv, (None, None, (num_heads + 2 * kv_heads) * head_dim))
    for name, tensor in (("positions", positions), ("kv_slots", kv_slots)):
        check_tensor(op, name, tensor, tuple(qkv.shape[:2]), INDEX)
    check_tensor(op, "rope", rope, (None, head_dim))
    if rope.shape[0] == 0:
        raise ValueError(f"{op}: rope is {list(rope.shape)}; allowed is [P, D] with P ≥ 1")
    for name, tensor in (("q_norm", q_norm), ("k_norm", k_norm)):
        if tensor is not None:
            check_tensor(op, name, tensor, (head_dim,), qkv.dtype)


def rope_kv_write_reference(
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
    """Rotated queries `[B, Q, H, D]`; keys and values go to the caches.

    Args:
        qkv: `[B, Q, (H + 2 KV) D]`, heads of q, then k, then v.
        positions: `[B, Q]` int64 or int32, clamped to the table.
        rope: `[P, D]`, cos then sin.
        kv_slots: `[B, Q]` int64 or int32 flat slots of the cache, −1 writes nothing.
        k_cache, v_cache: `[blocks, block_size, KV, D]`, contiguous (the kernel takes blocks that lie apart), written in place.
        q_norm, k_norm: `[D]` RMSNorm weights in qkv's dtype, applied to each head before rotation, or None.
        num_heads: H.
        eps: of the norms.
        kv_scales: `[2, KV]` float32, what keys (row 0) and values (row 1) of each head are divided by in an fp8 (e4m3) cache;
            needed there, ignored elsewhere.
    """
    _require_contiguous(k_cache=k_cache, v_cache=v_cache)
    kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.contiguous().view(*qkv.shape[:2], num_heads + 2 * kv_heads, head_dim)
    qk, v = heads.split([num_heads + kv_heads, kv_heads], dim=2)
    if q_norm is not None or k_norm is not None:
        halves = zip(qk.split([num_heads, kv_heads], dim=2), (q_norm, k_norm), strict=True)
        qk = torch.cat([x if weight is None else rms_norm_reference(x, weight, eps) for x, weight in halves], dim=2)
    q, k = rotate_reference(qk, positions, rope).split([num_heads, kv_heads], dim=2)
    k_scales, v_scales = (None, None) if kv_scales is None else kv_scales.unbind(0)
    write_kv_reference(k_cache, k, kv_slots, k_scales)
    write_kv_reference(v_cache, v, kv_slots, v_scales)
    return q.contiguous()


def rope_kv_write_cpu(
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
    """Same contract, and a ValueError for a slot that the cache does not have."""
    require_slots(max(kv_slots.reshape(-1).tolist(), default=-1), k_cache.shape[0] * k_cache.shape[1])
    return rope_kv_write_reference(qkv, positions, rope, kv_slots, k_cache, v_cache, q_norm, k_norm, num_heads, eps, kv_scales)


def _fake(qkv, positions, rope, kv_slots, k_cache, v_cache, q_norm, k_norm, num_heads, eps, kv_scales=None):
    return qkv.new_empty((*qkv.shape[:2], num_heads, k_cache.shape[3]))


rope_kv_write = register(
    "rope_kv_write(Tensor qkv, Tensor positions, Tensor rope, Tensor kv_slots, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor? q_norm, Tensor? k_norm, int num_heads, float eps, Tensor? kv_scales=None) -> Tensor",
    reference=rope_kv_write_reference,
    cpu=rope_kv_write_cpu,
    numba="stepgraph.kernels.rope_kv_numba:rope_kv_write_numba",
    triton="stepgraph.kernels.rope_kv_triton:rope_kv_write_triton",
    fake=_fake,
    check=check_rope_kv_write,
)
