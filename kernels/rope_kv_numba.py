"""Rotation of queries and keys and the KV write on the CPU as one call; see `stepgraph.kernels.rope_kv`."""

import numpy as np
import torch
from torch import Tensor

from stepgraph.kernels.norm_numba import norm_row
from stepgraph.kernels.numba_support import ELEMENTS, FLOAT32, INT64, array_at, as_index, exact, narrow, wide
from stepgraph.kernels.rope_kv import require_slots, rope_kv_write_cpu


@exact
def _rotate(head, angles, out, half, element):
    for i in range(half):
        first, second, cos, sin = wide(head[i]), wide(head[half + i]), angles[i], angles[half + i]
        out[i] = narrow(first * cos - second * sin, element)
        out[half + i] = narrow(second * cos + first * sin, element)


@exact
def _rope_kv_write(
    qkv_at, positions_at, rope_at, slots_at, k_at, v_at, q_norm_at, k_norm_at, out_at, rows, heads, kv_heads, head_dim,
    num_positions, num_slots, eps, element,
):  # fmt: skip
    """Returns the largest slot and, where the cache does not have it, writes nothing. A norm at address 0 is none."""
    slots, positions = array_at(slots_at, (rows,), INT64), array_at(positions_at, (rows,), INT64)
    largest = np.int64(-1)
    for row in range(rows):
        largest = max(largest, slots[row])
    if largest >= num_slots:
        return largest
    qkv = array_at(qkv_at, (rows, heads + 2 * kv_heads, head_dim), element)
    keys = array_at(k_at, (num_slots, kv_heads, head_dim), element)
    values = array_at(v_at, (num_slots, kv_heads, head_dim), element)
    rope = array_at(rope_at, (num_positions, head_dim), FLOAT32)
    out = array_at(out_at, (rows, heads, head_dim), element)
    normed = np.empty(head_dim, qkv.dtype)
    for row in range(rows):
        angles, slot = rope[min(max(positions[row], 0), num_positions - 1)], slots[row]
        for head in range(heads + kv_heads):
            source, norm_at = qkv[row, head], q_norm_at if head < heads else k_norm_at
            if norm_at != 0:
                norm_row(source, array_at(norm_at, (head_dim,), element), normed, head_dim, np.float32(eps), element)
                source = normed
            if head < heads:
                _rotate(source, angles, out[row, head], head_dim // 2, element)
            elif slot >= 0:
                _rotate(source, angles, keys[slot, head - heads], head_dim // 2, element)
        if slot >= 0:
            values[slot] = qkv[row, heads + kv_heads :]
    return largest


def rope_kv_write_numba(
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
    """Contract of `rope_kv_write_cpu`; float32 and bfloat16 with caches of the same dtype, the rest is left to it."""
    element, (kv_heads, head_dim) = ELEMENTS.get(qkv.dtype), k_cache.shape[2:]
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    in_place = k_cache.is_contiguous() and v_cache.is_contiguous()  # the contract asks for it, and that way it says so
    if element is None or k_cache.dtype != qkv.dtype or rope.dtype != torch.float32 or not in_place:
        return rope_kv_write_cpu(qkv, positions, rope, kv_slots, k_cache, v_cache, q_norm, k_norm, num_heads, eps, kv_scales)
    out = qkv.new_empty((*qkv.shape[:2], num_heads, head_dim))
    # Held until the call is over: an address keeps nothing alive.
    kept = qkv.contiguous(), as_index(positions), rope.contiguous(), as_index(kv_slots), k_cache, v_cache
    norms = [None if norm is None else norm.contiguous() for norm in (q_norm, k_norm)]
    largest = _rope_kv_write(
        *(tensor.data_ptr() for tensor in kept), *(0 if norm is None else norm.data_ptr() for norm in norms), out.data_ptr(),
        qkv.shape[0] * qkv.shape[1], num_heads, kv_heads, head_dim, len(rope), num_slots, eps, element,
    )  # fmt: skip
    require_slots(largest, num_slots)
    return out
