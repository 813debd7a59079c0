"""Matrix product on the CPU where Numba is: activations of int8 products are rounded and scaled in one call each."""

import numpy as np
import torch
from torch import Tensor

from stepgraph.kernels.linear import linear_cpu, packed_form
from stepgraph.kernels.linear_int8 import LEVELS, OFFSET, packed_int8_sums
from stepgraph.kernels.numba_support import ELEMENTS, FLOAT32, TO_INTEGER, array_at, exact, narrow, wide

TINY = np.finfo(np.float32).tiny


@exact
def _quantize(x_at, out_at, scale_at, rows, size, element):
    """`quantize_rows`, bit for bit, and the offset added."""
    x, out = array_at(x_at, (rows, size), element), array_at(out_at, (rows, size), np.uint8(0))
    scale = array_at(scale_at, (rows,), FLOAT32)
    for row in range(rows):
        # Without their sign, numbers have the order of their bits; NaN comes last. A maximum of integers vectorises.
        bits = np.uint32(0)
        for i in range(size):
            bits = max(bits, np.uint32(np.float32(wide(x[row, i])).view(np.uint32) & np.uint32(0x7FFFFFFF)))
        largest = np.uint32(bits).view(np.float32)
        factor = np.float32(LEVELS) / max(largest, np.float32(TINY))
        for i in range(size):
            step = np.float32(np.float32(wide(x[row, i]) * factor) + TO_INTEGER) - TO_INTEGER
            out[row, i] = np.uint8(np.int32(step if abs(step) <= np.float32(LEVELS) else np.float32(0)) + OFFSET)
        scale[row] = np.float32(largest / np.float32(LEVELS))


@exact
def _rescale(sums_at, scale_at, bias_at, out_at, rows, size, element):
    """`rescale`, bit for bit; a bias at address 0 is none."""
    sums, out = array_at(sums_at, (rows, size), FLOAT32), array_at(out_at, (rows, size), element)
    scale = array_at(scale_at, (rows,), FLOAT32)
    for row in range(rows):
        if bias_at == 0:
            for i in range(size):
                out[row, i] = narrow(sums[row, i] * scale[row], element)
        else:
            bias = array_at(bias_at, (size,), element)
            for i in range(size):
                out[row, i] = narrow(sums[row, i] * scale[row] + wide(bias[i]), element)


def linear_numba(x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool, scale: Tensor | None = None) -> Tensor:
    """Contract and bits of `linear_cpu`."""
    element = ELEMENTS.get(x.dtype)
    packed = packed_form(weight) if scale is not None and element is not None and x.numel() else None
    if packed is None:
        return linear_cpu(x, weight, bias, invariant, scale)
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    rows, (outer, inner) = x.numel() // x.shape[-1], weight.shape
    shifted, row_scale = torch.empty((rows, inner), dtype=torch.uint8), torch.empty(rows)
    _quantize(x.data_ptr(), shifted.data_ptr(), row_scale.data_ptr(), rows, inner, element)
    sums, out = packed_int8_sums(shifted, packed, scale), x.new_empty((*x.shape[:-1], outer))
    bias_at = 0 if bias is None else bias.data_ptr()
    _rescale(sums.data_ptr(), row_scale.data_ptr(), bias_at, out.data_ptr(), rows, outer, element)
    return out
