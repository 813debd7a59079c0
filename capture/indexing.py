"""`tensor[index]` on fake tensors of a device that this build of PyTorch knows nothing about.

Python's indexing asks for the device's guard before it dispatches, which fails without CUDA support even on a fake tensor. The
ops it would call need none, so this mode calls them: a trace then has the nodes that it would have with a CUDA build.
"""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


class GuardFreeIndexing(TorchFunctionMode):
    """Replaces `Tensor.__getitem__` by the ops it stands for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__getitem__ and args[0].device.type != "cpu":
            return index_with_ops(*args)
        return func(*args, **(kwargs or {}))


def index_with_ops(tensor: Tensor, index: object) -> Tensor:
    """`tensor[index]` for ints, slices, None, Ellipsis and tensors (or lists, which the capture contract refuses)."""
    parts = index if isinstance(index, tuple) else (index,)
    remaining = sum(part is not None and part is not Ellipsis for part in parts)  # dimensions still to be indexed
    dim, gathered = 0, {}
    for part in parts:
        if part is None:
            tensor, dim = tensor.unsqueeze(dim), dim + 1
            continue
        if part is Ellipsis:
            dim = tensor.dim() - remaining
            continue
        remaining -= 1
        if isinstance(part, slice):
            if part != slice(None):
                tensor = aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
            dim += 1
        elif isinstance(part, int) and not isinstance(part, bool):
            tensor = aten.select.int(tensor, dim, part)
        else:
            gathered[dim] = torch.as_tensor(part)
            dim += 1
    if gathered:
        tensor = aten.index.Tensor(tensor, [gathered.get(d) for d in range(max(gathered) + 1)])
    return tensor
