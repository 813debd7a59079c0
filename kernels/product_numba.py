"""Rows of activations times a packed weight (`stepgraph.kernels.packed`), in all of PyTorch's threads.

The weight is read once, from one end to the other, at the rate of the memory; each four outputs of it meet all rows. Rows keep
their bits whatever rows are beside them, how many there are and in how many threads (`stepgraph.kernels.tile_ir`).
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numba import typeof
from torch import Tensor

from stepgraph.kernels.jit import jit_for_threads
from stepgraph.kernels.numba_support import (
    ELEMENTS,
    FLOAT32,
    INT32,
    INT64,
    address_of,
    array_at,
    exact,
    narrow,
    thread_in_team,
    wide,
)
from stepgraph.kernels.openmp import run
from stepgraph.kernels.packed import OUTPUTS, Packed
from stepgraph.kernels.tile_ir import fuses, has, multiply_tile, step_of

ROWS = 4 if has("avx512f") else 1  # of a tile: its accumulators have to fit into registers
ROWS_AT_ONCE = 256  # so that scratch memory has a bound
BLOCK = 128  # outputs whose sums a thread finishes while they are near
AHEAD_BYTES = 1 << 14  # of the weight, which come from memory while the products of a tile are summed
ALONE_BYTES = 1 << 17  # a weight that is read before another thread has woken up


class Way(NamedTuple):
    """How weights of a dtype are multiplied: values in a step, and the types that activations and weights are read as."""

    values: int
    x: type[np.generic]
    w: type[np.generic]


def _ways() -> dict[torch.dtype, Way]:
    if not fuses():
        return {}
    pairs = {
        torch.float32: (np.float32, np.float32),
        torch.bfloat16: (np.uint16 if has("avx512bf16") else np.float32, np.uint16),
        torch.int8: (np.uint8, np.int8),
    }
    return {dtype: Way(step_of(*(typeof(kind(0)) for kind in pair)).values, *pair) for dtype, pair in pairs.items()}


WAYS = _ways()


def tile_for(fetches: int, in_turns: int) -> Callable:
    """`multiply_tile` for 1 to 4 rows; numbers that it takes as constants have to be written out."""

    def tile(x_like, w_like, rows, x_at, w_at, apart, fetch_at, sums_at, size, stride):
        if rows == 4:
            multiply_tile(x_like, w_like, 4, fetches, in_turns, x_at, w_at, apart, fetch_at, sums_at, size, stride)
        elif rows == 3:
            multiply_tile(x_like, w_like, 3, fetches, in_turns, x_at, w_at, apart, fetch_at, sums_at, size, stride)
        elif rows == 2:
            multiply_tile(x_like, w_like, 2, fetches, in_turns, x_at, w_at, apart, fetch_at, sums_at, size, stride)
        else:
            multiply_tile(x_like, w_like, 1, fetches, in_turns, x_at, w_at, apart, fetch_at, sums_at, size, stride)

    return exact(tile)


_tile, _fetching_tile = tile_for(fetches=0, in_turns=1), tile_for(fetches=1, in_turns=1)


@exact
def _finish_floats(sums, bias, out, rows, first, last, like):
    """`sums [rows, BLOCK]`, of the outputs `first .. last - 1`, as they leave the product."""
    for row in range(rows):
        if len(bias) == 0:
            for n in range(last - first):
                out[row, first + n] = narrow(sums[row, n], like)
        else:
            for n in range(last - first):
                out[row, first + n] = narrow(sums[row, n] + wide(bias[first + n]), like)


@exact
def _finish_bytes(sums, offsets, scale, row_scale, bias, out, rows, first, last, like):
    """The same for sums of bytes, rounded where `linear_int8_reference` rounds."""
    for row in range(rows):
        for n in range(first, last):
            value = np.float32(np.float32(np.int32(sums[row, n - first] - offsets[n])) * scale[n]) * row_scale[row]
            if len(bias) == 0:
                out[row, n] = narrow(value, like)
            else:
                out[row, n] = narrow(value + wide(bias[n]), like)


@cache
def _body(x_type: type[np.generic], w_type: type[np.generic], out_type: type[np.generic]) -> Callable:
    """What each thread runs: its share of the outputs."""
    # Numbers stand for their types; as keys of the cache they would all be 0, and equal.
    x_like, w_like, out_like = x_type(0), w_type(0), out_type(0)
    x_size, w_size, of_bytes = x_like.itemsize, w_like.itemsize, w_type is np.int8
    sum_type = np.int32 if of_bytes else np.float32

    def body(address):
        given = array_at(address, (12,), INT64)
        x_at, w_at, out_at, bias_at, scale_at, row_scale_at, offsets_at, rows, size, outer, number_at, count_at = given
        number, count = thread_in_team(number_at, count_at)
        tiles = -(-outer // OUTPUTS)
        sums, out = np.empty((rows, BLOCK), sum_type), array_at(out_at, (rows, outer), out_like)
        sums_at = address_of(sums)
        bias = array_at(bias_at, (outer if bias_at else 0,), out_like)
        last = tiles * (number + 1) // count * OUTPUTS
        for begin in range(tiles * number // count * OUTPUTS, last, BLOCK):
            end = min(begin + BLOCK, last)
            for n in range(begin, end, OUTPUTS):
                for row in range(0, rows, ROWS):
                    tile_at = w_at + n * size * w_size
                    fetch_at = tile_at + AHEAD_BYTES + row // ROWS * (OUTPUTS // 2 * size * w_size)
                    read = x_at + row * size * x_size, tile_at, 0, fetch_at
                    written = sums_at + 4 * (row * BLOCK + n - begin)
                    # Rows of one tile only wait for memory, and it is the processor that knows best what to fetch for them.
                    if rows > ROWS and row < 2 * ROWS:
                        _fetching_tile(x_like, w_like, min(ROWS, rows - row), *read, written, size, BLOCK)
                    else:
                        _tile(x_like, w_like, min(ROWS, rows - row), *read, written, size, BLOCK)
            if of_bytes:
                scale, row_scale = array_at(scale_at, (outer,), FLOAT32), array_at(row_scale_at, (rows,), FLOAT32)
                offsets = array_at(offsets_at, (outer,), INT32)
                _finish_bytes(sums, offsets, scale, row_scale, bias, out, rows, begin, min(end, outer), out_like)
            else:
                _finish_floats(sums, bias, out, rows, begin, min(end, outer), out_like)

    return jit_for_threads(body)


def multiply(
    x: Tensor, packed: Packed, bias: Tensor | None, scale: Tensor | None, row_scale: Tensor | None, out: Tensor
) -> None:
    """Rows `x [.., K]` times a packed weight `[N, K]` into `out [.., N]`, float32 or bfloat16; all side by side in memory.

    Args:
        x: float32 or bfloat16 like the weight; for an int8 weight uint8, shifted by 128.
        packed: the weight.
        bias: `[N]` in the dtype of `out`.
        scale, row_scale: float32 of each output and of each row, with an int8 weight.
        out: what is written.
    """
    way, outer = WAYS[packed.source.dtype], packed.source.shape[0]
    if x.dtype == torch.bfloat16 and way.x is np.float32:
        x = x.float()
    if x.shape[-1] % way.values:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % way.values))
    size = x.shape[-1]
    rows = x.numel() // size
    body, alone = _body(way.x, way.w, type(ELEMENTS[out.dtype])).address, packed.steps.nbytes <= ALONE_BYTES
    steps_at, row_scale_at = packed.steps.data_ptr(), 0 if row_scale is None else row_scale.data_ptr()
    bias_at, scale_at, offsets_at = (0 if each is None else each.data_ptr() for each in (bias, scale, packed.offsets))
    for first in range(0, rows, ROWS_AT_ONCE):
        x_at, out_at = x.data_ptr() + first * size * x.itemsize, out.data_ptr() + first * outer * out.itemsize
        count = min(ROWS_AT_ONCE, rows - first)
        addresses = [x_at, steps_at, out_at, bias_at, scale_at, row_scale_at + 4 * first, offsets_at]
        run(body, [*addresses, count, size, outer], alone)
