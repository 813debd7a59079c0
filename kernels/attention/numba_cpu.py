"""Uniform-decode attention on the CPU as one call in PyTorch's threads; see `stepgraph.kernels.attention.cpu`.

A thread takes a KV head of a row: scores of all its queries against all its keys, their softmax, the weighted sum of values.
Keys and values are read once and in place. What a query comes to depends on nothing but itself and its keys, bit for bit.
"""

from array import array
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from stepgraph.kernels.attention.cpu import MAX_ROWWISE_QUERY, require_blocks, uniform_decode_attention_cpu
from stepgraph.kernels.attention.values_ir import VECTORS, add_weighted
from stepgraph.kernels.jit import jit_for_threads
from stepgraph.kernels.numba_support import (
    ELEMENTS,
    FLOAT32,
    INT64,
    address_of,
    array_at,
    as_index,
    exact,
    exponential,
    kernel,
    narrow,
    thread_in_team,
    wide,
)
from stepgraph.kernels.openmp import run
from stepgraph.kernels.packed import OUTPUTS
from stepgraph.kernels.product_numba import ROWS, WAYS, Way, tile_for
from stepgraph.kernels.tile_ir import LANES


@kernel
def _softmax(scores, scale, softcap):
    """Weights `exp(score - largest)` in place of scores; returns their sum."""
    largest = np.float32(-np.inf)
    if softcap > 0:
        for s in range(len(scores)):
            scores[s] = softcap * np.tanh(scores[s] * scale / softcap)
            largest = max(largest, scores[s])
    else:
        for s in range(len(scores)):
            scores[s] = scores[s] * scale
            largest = max(largest, scores[s])
    mass = np.float32(0)
    for s in range(len(scores)):
        scores[s] = exponential(scores[s] - largest)
        mass += scores[s]
    return mass


@kernel
def _bounds(table):
    """The least and the largest block of a table, which is not empty."""
    least, largest = table[0, 0], table[0, 0]
    for row in range(len(table)):
        for block in range(table.shape[1]):
            least, largest = min(least, table[row, block]), max(largest, table[row, block])
    return least, largest


def _values_for(vectors: int) -> Callable:
    """`add_weighted` for 1 to 4 queries, as `tile_for` is for products."""

    def add(v_like, queries, weights_at, weights_apart, v_at, v_apart, count, totals_at, apart):
        if queries == 4:
            add_weighted(v_like, 4, vectors, weights_at, weights_apart, v_at, v_apart, count, totals_at, apart)
        elif queries == 3:
            add_weighted(v_like, 3, vectors, weights_at, weights_apart, v_at, v_apart, count, totals_at, apart)
        elif queries == 2:
            add_weighted(v_like, 2, vectors, weights_at, weights_apart, v_at, v_apart, count, totals_at, apart)
        else:
            add_weighted(v_like, 1, vectors, weights_at, weights_apart, v_at, v_apart, count, totals_at, apart)

    return exact(add)


_score_tile = tile_for(fetches=0, in_turns=0)
_add_one, _add_four = _values_for(1), _values_for(VECTORS)


@exact
def _readable(at, apart, rows, size, near, in_place, like):
    """Where `rows` times `size` values can be read by whole tiles, and how many bytes rows are apart: where they are, or else
    copied into `near [>= rows, >= size]`, which stays 0 elsewhere.
    """
    if in_place:
        return at, apart
    for row in range(rows):
        source = array_at(at + row * apart, (size,), like)
        for d in range(size):
            near[row, d] = source[d]
    return address_of(near), near.shape[1] * near.itemsize


@exact
def _range(first, i, window, capacity):
    """Keys that query i sees, for a query 0 at position `first`."""
    start = max(0, first + i + 1 - window) if window > 0 else 0
    return start, max(start, min(first + i + 1, capacity))


@exact
def _add_values(v_like, v_size, weights, totals, j, count, low, high, v_at, v_apart):
    """Add values of the keys `low .. high - 1` to the totals of `count` queries from j on; key 0's would be at `v_at`."""
    keys, size = weights.shape[1], totals.shape[1]
    weights_at = address_of(weights) + 4 * (j * keys + low)
    for d in range(0, size, LANES if size % (VECTORS * LANES) else VECTORS * LANES):
        read = weights_at, 4 * keys, v_at + low * v_apart + d * v_size, v_apart, high - low
        if size % (VECTORS * LANES):
            _add_one(v_like, count, *read, address_of(totals) + 4 * (j * size + d), 4 * size)
        else:
            _add_four(v_like, count, *read, address_of(totals) + 4 * (j * size + d), 4 * size)


@exact
def _add_block(v_like, v_size, weights, totals, groups, first, window, capacity, begin, end, v_at, v_apart):
    """Add values of the keys `begin .. end - 1`, of which the first is at `v_at`, to the totals of the queries that see them:
    four queries at once for the keys that all of them see, each alone for those before and after.
    """
    v_at -= begin * v_apart
    for j in range(0, len(totals), ROWS):
        count = min(ROWS, len(totals) - j)
        start = _range(first, (j + count - 1) // groups, window, capacity)[0]
        stop = _range(first, j // groups, window, capacity)[1]
        start = min(max(start, begin), end)
        stop = min(max(stop, start), end)
        for low, high, together in ((begin, start, False), (start, stop, True), (stop, end, False)):
            if high <= low:
                continue
            if together:
                _add_values(v_like, v_size, weights, totals, j, count, low, high, v_at, v_apart)
                continue
            for m in range(j, j + count):
                seen = _range(first, m // groups, window, capacity)
                seen_low, seen_high = max(low, seen[0]), min(high, seen[1])
                if seen_high > seen_low:
                    _add_values(v_like, v_size, weights, totals, m, 1, seen_low, seen_high, v_at, v_apart)


@cache
def _body(way: Way, element_type: type[np.generic]) -> Callable:
    """What each thread runs: its share of the rows and KV heads. Nothing where the cache does not have a block of the table."""
    element, x_like, w_like, x_type, w_type = element_type(0), way.x(0), way.w(0), way.x, way.w
    x_size, w_size, same = x_like.itemsize, w_like.itemsize, way.x is element_type
    aligned = max(way.values, LANES)

    def body(address):
        given = array_at(address, (21,), INT64)
        q_at, k_at, v_at, table_at, lengths_at, out_at, bounds_at, scale_at = given[:8]
        rows, query_len, heads, head_dim, kv_heads, block_size, k_stride, v_stride, table_blocks, num_blocks = given[8:18]
        window, number_at, count_at = given[18:]
        number, count = thread_in_team(number_at, count_at)
        table, lengths = array_at(table_at, (rows, table_blocks), INT64), array_at(lengths_at, (rows,), INT64)
        least, largest = _bounds(table)
        if number == 0:
            bounds = array_at(bounds_at, (2,), INT64)
            bounds[0], bounds[1] = least, largest
        if least < 0 or largest >= num_blocks:
            return
        numbers = array_at(scale_at, (2,), FLOAT32)
        q = array_at(q_at, (rows, query_len, heads, head_dim), element)
        out = array_at(out_at, (rows, query_len, heads, head_dim), element)
        capacity, groups, items = table_blocks * block_size, heads // kv_heads, rows * kv_heads
        queries, line = query_len * groups, kv_heads * head_dim * w_size
        size = -(-head_dim // aligned) * aligned
        in_place = size == head_dim and block_size % OUTPUTS == 0
        most = np.int64(0)
        for row in range(rows):
            most = max(most, min(lengths[row], capacity))
        wanted, totals = np.zeros((queries, size), x_type), np.empty((queries, size), np.float32)
        scores, mass = np.empty((queries, most + OUTPUTS), np.float32), np.empty(queries, np.float32)
        near = np.zeros((1 if in_place else block_size + OUTPUTS, size), w_type)
        for item in range(items * number // count, items * (number + 1) // count):
            row, kv_head = item // kv_heads, item % kv_heads
            first = lengths[row] - query_len  # position of query 0
            begin, stored = _range(first, 0, window, capacity)[0], min(lengths[row], capacity)
            for j in range(queries):
                for d in range(head_dim):
                    value = q[row, j // groups, kv_head * groups + j % groups, d]
                    wanted[j, d] = value if same else wide(value)
            for block in range(begin // block_size, -(-stored // block_size)):
                at = k_at + table[row, block] * k_stride + kv_head * head_dim * w_size
                inside = min(block_size, stored - block * block_size)
                at, apart = _readable(at, line, inside, head_dim, near, in_place, w_like)
                for s in range(0, inside, OUTPUTS):
                    for j in range(0, queries, ROWS):
                        read = address_of(wanted) + j * size * x_size, at + s * apart, apart, 0
                        written = address_of(scores) + 4 * (j * scores.shape[1] + block * block_size + s)
                        _score_tile(x_like, w_like, min(ROWS, queries - j), *read, written, size, scores.shape[1])
            for j in range(queries):
                start, stop = _range(first, j // groups, window, capacity)
                mass[j] = _softmax(scores[j, start:stop], numbers[0], numbers[1])
            totals[:] = np.float32(0)
            for block in range(begin // block_size, -(-stored // block_size)):
                at = v_at + table[row, block] * v_stride + kv_head * head_dim * w_size
                inside = min(block_size, stored - block * block_size)
                at, apart = _readable(at, line, inside, head_dim, near, in_place, w_like)
                edges = block * block_size, block * block_size + inside
                _add_block(w_like, w_size, scores, totals, groups, first, window, capacity, *edges, at, apart)
            for j in range(queries):
                share = np.float32(1) / mass[j] if mass[j] != 0 else np.float32(0)  # no key at all: zeros
                for d in range(head_dim):
                    out[row, j // groups, kv_head * groups + j % groups, d] = narrow(totals[j, d] * share, element)

    return jit_for_threads(body)


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
    way, (rows, query_len, heads, head_dim) = WAYS.get(q.dtype), q.shape
    if way is None or k_cache.dtype != q.dtype or query_len > MAX_ROWWISE_QUERY:
        return uniform_decode_attention_cpu(
            q, k_cache, v_cache, block_table, seq_lens, scale, window, softcap, kv_scales, work, scratch
        )
    out, (_, block_size, kv_heads, _) = torch.empty_like(q, memory_format=torch.contiguous_format), k_cache.shape
    if not block_table.numel():
        return out.zero_()
    # Blocks may lie apart; a block may not.
    k_cache, v_cache = (
        cache if cache.stride()[1:] == (kv_heads * head_dim, head_dim, 1) else cache.contiguous()
        for cache in (k_cache, v_cache)
    )
    # Held until the call is over: an address keeps nothing alive.
    kept = q.contiguous(), k_cache, v_cache, as_index(block_table), as_index(seq_lens)
    bounds, numbers = array("q", [0, 0]), array("f", [scale, softcap])
    addresses = [*(tensor.data_ptr() for tensor in kept), out.data_ptr(), bounds.buffer_info()[0], numbers.buffer_info()[0]]
    strides = k_cache.stride(0) * k_cache.itemsize, v_cache.stride(0) * v_cache.itemsize
    sizes = [rows, query_len, heads, head_dim, kv_heads, block_size, *strides, block_table.shape[1], len(k_cache), window]
    run(_body(way, type(ELEMENTS[q.dtype])).address, addresses + sizes, alone=rows * kv_heads == 1)
    require_blocks(*bounds, len(k_cache))
    return out
