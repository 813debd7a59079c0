"""Matrix product on the CPU where Numba is."""

import numpy as np
import torch
from torch import Tensor

from stepgraph.kernels.linear import linear_cpu
from stepgraph.kernels.linear_int8 import LEVELS
from stepgraph.kernels.numba_support import ELEMENTS, FLOAT32, TO_INTEGER, array_at, exact, wide
from stepgraph.kernels.packed import OFFSET, packed_form
from stepgraph.kernels.product_numba import multiply

# So many rows are worth the matrix units of AMX, which only PyTorch uses.
MATRIX_ROWS = 32 if torch.cpu._is_amx_tile_supported() else 1 << 62
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


def linear_numba(x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool, scale: Tensor | None = None) -> Tensor:
    """Contract of `linear_cpu`; a packed weight goes through our own product, whose rows are always invariant."""
    packed = packed_form(weight)
    outer, inner = weight.shape
    many = weight.dtype == torch.bfloat16 and not invariant and x.numel() >= MATRIX_ROWS * inner
    if packed is None or many or x.numel() == 0 or x.dtype not in ELEMENTS:
        return linear_cpu(x, weight, bias, invariant, scale)
    x, bias, row_scale = x.contiguous(), None if bias is None else bias.contiguous(), None
    out = x.new_empty((*x.shape[:-1], outer))
    if scale is not None:
        scale, rows = scale.contiguous(), x.numel() // inner
        shifted, row_scale = torch.empty((rows, inner), dtype=torch.uint8), torch.empty(rows)
        _quantize(x.data_ptr(), shifted.data_ptr(), row_scale.data_ptr(), rows, inner, ELEMENTS[x.dtype])
        x = shifted
    multiply(x, packed, bias, scale, row_scale, out)
    return out
