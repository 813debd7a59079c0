"""RMSNorm on the CPU as one call; see `stepgraph.kernels.norm`."""

import numpy as np
import torch
from torch import Tensor

from stepgraph.kernels.norm import add_rms_norm_reference, rms_norm_reference
from stepgraph.kernels.numba_support import ELEMENTS, array_at, kernel, narrow, wide


@kernel
def norm_row(x, weight, out, size, eps, element):
    """`out = weight * x / rms(x)` for arrays of `size`, rounded where the reference rounds."""
    total = np.float32(0)
    for i in range(size):
        total += wide(x[i]) * wide(x[i])
    scale = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
    for i in range(size):
        normed = wide(narrow(wide(x[i]) * scale, element))
        out[i] = narrow(wide(weight[i]) * normed, element)


@kernel
def _rms_norm(x_at, weight_at, out_at, rows, size, eps, element):
    x, out = array_at(x_at, (rows, size), element), array_at(out_at, (rows, size), element)
    weight = array_at(weight_at, (size,), element)
    for row in range(rows):
        norm_row(x[row], weight, out[row], size, np.float32(eps), element)


@kernel
def _add_rms_norm(x_at, residual_at, weight_at, out_at, total_at, rows, size, eps, element):
    x, residual = array_at(x_at, (rows, size), element), array_at(residual_at, (rows, size), element)
    out, total = array_at(out_at, (rows, size), element), array_at(total_at, (rows, size), element)
    weight = array_at(weight_at, (size,), element)
    for row in range(rows):
        for i in range(size):
            total[row, i] = narrow(wide(x[row, i]) + wide(residual[row, i]), element)
        norm_row(total[row], weight, out[row], size, np.float32(eps), element)


def rms_norm_numba(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Contract of `rms_norm_reference`; float32 and bfloat16, other dtypes are left to it."""
    element = ELEMENTS.get(x.dtype)
    if element is None:
        return rms_norm_reference(x, weight, eps)
    x, weight = x.contiguous(), weight.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    _rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps, element)
    return out


def add_rms_norm_numba(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Contract of `add_rms_norm_reference`; float32 and bfloat16, other dtypes are left to it."""
    element = ELEMENTS.get(x.dtype)
    if element is None:
        return add_rms_norm_reference(x, residual, weight, eps)
    x, residual, weight = x.contiguous(), residual.contiguous(), weight.contiguous()
    out, total, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    _add_rms_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(), x.numel() // size, size, eps,
        element,
    )  # fmt: skip
    return out, total
