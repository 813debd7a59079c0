"""Small copies between host and device that neither side waits for."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload_source(values: Sequence | np.ndarray, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Host numbers as a host tensor that a copy to the device can start from without being waited for. PyTorch's allocator of
    pinned memory keeps it until the copy is done.
    """
    if isinstance(values, np.ndarray) and not pinned:
        return torch.from_numpy(values)
    return torch.tensor(values, dtype=dtype, pin_memory=pinned)


def upload(target: Tensor, values: Sequence | np.ndarray) -> None:
    """Write host numbers into a tensor, in stream order."""
    target.copy_(upload_source(values, target.dtype, target.is_cuda), non_blocking=True)


def integers(values: Sequence | np.ndarray, device: torch.device) -> Tensor:
    """Host integers as an int64 tensor of the device, without waiting for it."""
    return upload_source(values, torch.int64, device.type == "cuda").to(device, non_blocking=True)


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
