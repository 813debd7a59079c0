"""The gated activation on the CPU as one call; see `stepgraph.kernels.activation`."""

import numpy as np
from torch import Tensor

from stepgraph.kernels.activation import silu_mul_reference
from stepgraph.kernels.numba_support import ELEMENTS, array_at, exponential, kernel, narrow, wide


@kernel
def _silu_mul(gate_up_at, out_at, rows, size, element):
    gate_up, out = array_at(gate_up_at, (rows, 2, size), element), array_at(out_at, (rows, size), element)
    for row in range(rows):
        for i in range(size):
            gate = wide(gate_up[row, 0, i])
            # The smaller of two exponentials, which cannot overflow.
            small = exponential(-abs(gate))
            silu = gate * (np.float32(1) if gate >= 0 else small) / (np.float32(1) + small)
            out[row, i] = narrow(wide(narrow(silu, element)) * wide(gate_up[row, 1, i]), element)


def silu_mul_numba(gate_up: Tensor) -> Tensor:
    """Contract of `silu_mul_reference`; float32 and bfloat16, other dtypes are left to it."""
    element = ELEMENTS.get(gate_up.dtype)
    if element is None:
        return silu_mul_reference(gate_up)
    gate_up, size = gate_up.contiguous(), gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    _silu_mul(gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size, element)
    return out
