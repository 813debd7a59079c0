"""Tensor methods that work on fake tensors of a device that this build of PyTorch knows nothing about.

A few Python bindings ask for the device's guard before they dispatch, which fails without CUDA support even on a fake tensor.
The ops they would call need none, so this mode calls them: a trace then has the nodes that it would have with a CUDA build.
"""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten


class GuardFree(TorchFunctionMode):
    """Replaces guarded bindings by the ops they stand for, on tensors that are not on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        op = GUARDED.get(func)
        if op is not None and args[0].device.type != "cpu":
            func = op
        return func(*args, **(kwargs or {}))


def _split_index(tensor: Tensor, index: object) -> tuple[Tensor, list[Tensor | None]]:
    """The view that ints, slices, None and Ellipsis select, and the tensors (or lists) that index its dimensions."""
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
    return tensor, [gathered.get(d) for d in range(max(gathered, default=-1) + 1)]


def get_item(tensor: Tensor, index: object) -> Tensor:
    """`tensor[index]`."""
    view, gathered = _split_index(tensor, index)
    return aten.index.Tensor(view, gathered) if gathered else view


def set_item(tensor: Tensor, index: object, value: Tensor | float) -> None:
    """`tensor[index] = value`."""
    view, gathered = _split_index(tensor, index)
    if gathered:
        value = value if isinstance(value, Tensor) else aten.full.default([], value, dtype=view.dtype, device=view.device)
        aten.index_put_.default(view, gathered, value)
    elif isinstance(value, Tensor):
        aten.copy_.default(view, value)
    else:
        aten.fill_.Scalar(view, value)


GUARDED = {
    Tensor.__getitem__: get_item,
    Tensor.__setitem__: set_item,
    Tensor.contiguous: aten.contiguous.default,
    Tensor.copy_: aten.copy_.default,
    Tensor.nonzero: aten.nonzero.default,
}
