"""Small copies between host and device that neither side waits for."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(target: Tensor, values: Sequence) -> None:
    """Write host numbers into a tensor, in stream order.

    On CUDA the copy starts from pinned memory and is not waited for; PyTorch's allocator of pinned memory keeps the source
    until the copy is done.
    """
    source = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
    target.copy_(source, non_blocking=True)


def integers(values: Sequence, device: torch.device) -> Tensor:
    """Host integers as an int64 tensor of the device, without waiting for it."""
    return torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class Download:
    """A copy of a tensor as it is now in stream order; `wait` gives it to the host as soon as the device has got there."""

    def __init__(self, source: Tensor):
        if source.is_cuda:
            self.copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            self.copy.copy_(source, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.copy, self.event = source.clone(), None

    def wait(self) -> np.ndarray:
        """The tensor's values. They are the caller's, who may change them."""
        if self.event is not None:
            self.event.synchronize()
        return self.copy.numpy()
