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
from stepgraph.kernels.product_numba import ROWS, WAYS, Way
from stepgraph.kernels.tile_ir import LANES, multiply_tile


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


@exact
def _score_tile(x_like, w_like, queries, q_at, k_at, apart, scores_at, size, stride):
    """`multiply_tile` for 1 to 4 queries; numbers that it takes as constants have to be written out."""
    if queries == 4:
        multiply_tile(x_like, w_like, 4, 0, q_at, k_at, apart, scores_at, size, stride)
    elif queries == 3:
        multiply_tile(x_like, w_like, 3, 0, q_at, k_at, apart, scores_at, size, stride)
    elif queries == 2:
        multiply_tile(x_like, w_like, 2, 0, q_at, k_at, apart, scores_at, size, stride)
    else:
        multiply_tile(x_like, w_like, 1, 0, q_at, k_at, apart, scores_at, size, stride)


def _values_for(vectors: int) -> Callable:
    """The same for `add_weighted`."""

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


_add_one, _add_four = _values_for(1), _values_for(VECTORS)


@exact
def _padded(source_at, apart, rows, size, out, like):
    """`rows` times `size` values into `out [>= rows, >= size]`, which stays 0 elsewhere."""
    for row in range(rows):
        source = array_at(source_at + row * apart, (size,), like)
        for d in range(size):
            out[row, d] = source[d]


@exact
def _at(array):
    """The address of an array, with which one can reckon: as Numba has it, without a sign, a sum with it is a float."""
    return np.int64(array.ctypes.data)


@exact
def _range(first, i, window, capacity):
    """Keys that query i sees, for a query 0 at position `first`."""
    start = max(0, first + i + 1 - window) if window > 0 else 0
    return start, max(start, min(first + i + 1, capacity))


@exact
def _add_values(v_like, v_size, weights, totals, j, count, low, high, v_at, v_apart):
    """Add values of the keys `low .. high - 1`, of which the first is at `v_at`, to the totals of `count` queries from j on."""
    keys, size = weights.shape[1], totals.shape[1]
    weights_at = _at(weights) + 4 * (j * keys + low)
    for d in range(0, size, LANES if size % (VECTORS * LANES) else VECTORS * LANES):
        read = weights_at, 4 * keys, v_at + d * v_size, v_apart, high - low
        if size % (VECTORS * LANES):
            _add_one(v_like, count, *read, _at(totals) + 4 * (j * size + d), 4 * size)
        else:
            _add_four(v_like, count, *read, _at(totals) + 4 * (j * size + d), 4 * size)


@exact
def _add_block(v_like, v_size, weights, totals, groups, first, window, capacity, begin, end, v_at, v_apart):
    """Add values of the keys `begin .. end - 1`, of which the first is at `v_at`, to the totals of the queries that see them:
    four queries at once for the keys that all of them see, each alone for those before and after.
    """
    for j in range(0, len(totals), ROWS):
        count = min(ROWS, len(totals) - j)
        start = _range(first, (j + count - 1) // groups, window, capacity)[0]
        stop = _range(first, j // groups, window, capacity)[1]
        start = min(max(start, begin), end)
        stop = min(max(stop, start), end)
        for part in range(3):
            if part == 1:
                if stop > start:
                    at = v_at + (start - begin) * v_apart
                    _add_values(v_like, v_size, weights, totals, j, count, start, stop, at, v_apart)
                continue
            edge, last = (begin, start) if part == 0 else (stop, end)
            for m in range(j, j + count if last > edge else j):
                low, high = _range(first, m // groups, window, capacity)
                low, high = max(low, edge), min(high, last)
                if high > low:
                    at = v_at + (low - begin) * v_apart
                    _add_values(v_like, v_size, weights, totals, m, 1, low, high, at, v_apart)


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
                at, apart = k_at + table[row, block] * k_stride + kv_head * head_dim * w_size, line
                inside = min(block_size, stored - block * block_size)
                if not in_place:
                    _padded(at, line, inside, head_dim, near, w_like)
                    at, apart = _at(near), size * w_size
                for s in range(0, inside, OUTPUTS):
                    for j in range(0, queries, ROWS):
                        read = _at(wanted) + j * size * x_size, at + s * apart, apart
                        written = _at(scores) + 4 * (j * scores.shape[1] + block * block_size + s)
                        _score_tile(x_like, w_like, min(ROWS, queries - j), *read, written, size, scores.shape[1])
            for j in range(queries):
                start, stop = _range(first, j // groups, window, capacity)
                mass[j] = _softmax(scores[j, start:stop], numbers[0], numbers[1])
            totals[:] = np.float32(0)
            for block in range(begin // block_size, -(-stored // block_size)):
                at, apart = v_at + table[row, block] * v_stride + kv_head * head_dim * w_size, line
                inside = min(block_size, stored - block * block_size)
                if not in_place:
                    _padded(at, line, inside, head_dim, near, w_like)
                    at, apart = _at(near), size * w_size
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
