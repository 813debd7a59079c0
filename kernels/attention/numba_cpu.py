"""Uniform-decode attention on the CPU as one call; see `stepgraph.kernels.attention.cpu`."""

import numpy as np
import torch
from torch import Tensor

from stepgraph.kernels.attention.cpu import MAX_ROWWISE_QUERY, require_blocks, uniform_decode_attention_cpu
from stepgraph.kernels.numba_support import ELEMENTS, INT64, array_at, as_index, exponential, kernel, narrow, wide


@kernel
def _query(q, keys, values, out, scores, wanted, total, start, stop, scale, softcap, element):
    """One query `q [D]` over `keys, values [S, D]` from `start` to `stop`; `scores [S]`, `wanted, total [D]` are scratch."""
    size = len(q)
    for d in range(size):
        wanted[d], total[d] = wide(q[d]) * scale, np.float32(0)
    largest = np.float32(-np.inf)
    for s in range(start, stop):
        score = np.float32(0)
        for d in range(size):
            score += wanted[d] * keys[s, d]
        if softcap > 0:
            score = softcap * np.tanh(score / softcap)
        scores[s] = score
        largest = max(largest, score)
    mass = np.float32(0)
    for s in range(start, stop):
        scores[s] = exponential(scores[s] - largest)
        mass += scores[s]
    last = start + (stop - start) // 4 * 4
    for s in range(start, last, 4):  # four at a time: a sum is then loaded and stored once for four terms
        a, b, c, e = scores[s], scores[s + 1], scores[s + 2], scores[s + 3]
        for d in range(size):
            total[d] += a * values[s, d] + b * values[s + 1, d] + c * values[s + 2, d] + e * values[s + 3, d]
    for s in range(last, stop):
        for d in range(size):
            total[d] += scores[s] * values[s, d]
    for d in range(size):
        out[d] = narrow(total[d] / mass, element)


@kernel
def _attention(
    q_at, k_at, v_at, table_at, lengths_at, out_at, rows, query_len, heads, kv_heads, head_dim, block_size, k_stride, v_stride,
    table_blocks, num_blocks, scale, window, softcap, element,
):  # fmt: skip
    """Returns the least and the largest block of the table, which is not empty; does no more where the cache does not have
    them. Strides are of blocks, in bytes.
    """
    q = array_at(q_at, (rows, query_len, heads, head_dim), element)
    out = array_at(out_at, (rows, query_len, heads, head_dim), element)
    table, lengths = array_at(table_at, (rows, table_blocks), INT64), array_at(lengths_at, (rows,), INT64)
    least, largest = table[0, 0], table[0, 0]
    for row in range(rows):
        for block in range(table_blocks):
            least, largest = min(least, table[row, block]), max(largest, table[row, block])
    if least < 0 or largest >= num_blocks:
        return least, largest
    capacity, groups, lane = table_blocks * block_size, heads // kv_heads, kv_heads * head_dim
    most = np.int64(0)
    for row in range(rows):
        most = max(most, min(lengths[row], capacity))
    keys, values = np.empty((most, head_dim), np.float32), np.empty((most, head_dim), np.float32)
    scores, wanted, total = np.empty(most, np.float32), np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    for row in range(rows):
        first = lengths[row] - query_len  # position of query 0
        stored = min(lengths[row], capacity)
        unseen = max(0, first + 1 - window) if window > 0 else 0
        for kv_head in range(kv_heads):
            for block in range(unseen // block_size, -(-stored // block_size)):
                k = array_at(k_at + table[row, block] * k_stride, (block_size, lane), element)
                v = array_at(v_at + table[row, block] * v_stride, (block_size, lane), element)
                for s in range(min(block_size, stored - block * block_size)):
                    for d in range(head_dim):
                        keys[block * block_size + s, d] = wide(k[s, kv_head * head_dim + d])
                        values[block * block_size + s, d] = wide(v[s, kv_head * head_dim + d])
            for i in range(query_len):
                stop = min(first + i + 1, capacity)
                start = max(0, first + i + 1 - window) if window > 0 else 0
                for head in range(kv_head * groups, (kv_head + 1) * groups):
                    if stop <= start:
                        out[row, i, head] = narrow(np.float32(0), element)
                    else:
                        _query(
                            q[row, i, head], keys, values, out[row, i, head], scores, wanted, total, start, stop, scale,
                            softcap, element,
                        )  # fmt: skip
    return least, largest


def uniform_decode_attention_numba(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    kv_scales: Tensor | None = None,
    work: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Contract of `uniform_decode_attention_cpu`; few queries in float32 or bfloat16 with a cache of the same dtype, the rest
    is left to it.
    """
    element, (rows, query_len, heads, head_dim) = ELEMENTS.get(q.dtype), q.shape
    if element is None or k_cache.dtype != q.dtype or query_len > MAX_ROWWISE_QUERY:
        return uniform_decode_attention_cpu(
            q, k_cache, v_cache, block_table, seq_lens, scale, window, softcap, kv_scales, work, scratch
        )
    out, (_, block_size, kv_heads, _) = torch.empty_like(q, memory_format=torch.contiguous_format), k_cache.shape
    if not block_table.numel():
        return out.zero_()
    # Blocks may lie apart; a block may not.
    k_cache, v_cache = (cache if cache[:1].is_contiguous() else cache.contiguous() for cache in (k_cache, v_cache))
    # Held until the call is over: an address keeps nothing alive.
    kept = q.contiguous(), k_cache, v_cache, as_index(block_table), as_index(seq_lens)
    least, largest = _attention(
        *(tensor.data_ptr() for tensor in kept), out.data_ptr(), rows, query_len, heads, kv_heads, head_dim, block_size,
        k_cache.stride(0) * k_cache.itemsize, v_cache.stride(0) * v_cache.itemsize, block_table.shape[1], len(k_cache),
        np.float32(scale), window, np.float32(softcap), element,
    )  # fmt: skip
    require_blocks(least, largest, len(k_cache))
    return out
