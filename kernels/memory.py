"""Memory of the CPU for what every step reads from one end to the other: weights as products take them, and the KV cache."""

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

LARGE_PAGE_BYTES = 1 << 21


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, in large pages where the system has them for the asking (Linux, `transparent_hugepage` not `never`).

    The processor looks up where a page is whenever it comes to one, and stops fetching ahead at its end: reading a model's
    weights in pages of 4 KiB takes a fifth longer.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device="cpu")
    whole = (-(-size // LARGE_PAGE_BYTES) + 1) * LARGE_PAGE_BYTES  # one more, as it may start anywhere in a large page
    memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    values = torch.frombuffer(memory, dtype=torch.uint8)
    start = -values.data_ptr() % LARGE_PAGE_BYTES
    return values[start : start + size].view(dtype).view(*shape)
