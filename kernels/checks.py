"""One sentence about a tensor that an operator cannot take."""

import torch
from torch import Tensor


def check_tensor(op: str, name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype | None = None) -> None:
    """Raise a ValueError that names the operator, the argument, what it is and what is allowed. Reads nothing but metadata.

    Args:
        op, name: of the operator and of its argument.
        tensor: the argument.
        shape: what its shape has to be; None is any size.
        dtype: what its dtype has to be; None is any floating-point one.
    """
    fits = tensor.dim() == len(shape) and all(want in (None, have) for want, have in zip(shape, tensor.shape, strict=True))
    if fits and (tensor.dtype == dtype if dtype else tensor.is_floating_point()):
        return
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    raise ValueError(
        f"{op}: {name} is {_dtype_name(tensor.dtype)} {list(tensor.shape)}; allowed is "
        f"{_dtype_name(dtype) if dtype else 'any float'} [{sizes}]"
    )


def check_rows(op: str, rows: int, **tensors: Tensor) -> None:
    """`check_tensor` of one number per row, by the names that parameters of sampling have everywhere."""
    for name, tensor in tensors.items():
        check_tensor(op, name, tensor, (rows,), _ROW_DTYPES[name])


_ROW_DTYPES = {name: torch.float32 for name in ("temperature", "top_p", "min_p")} | {
    name: torch.int64 for name in ("top_k", "seed", "position", "base", "method")
}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
