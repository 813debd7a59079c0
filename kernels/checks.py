"""One sentence about an argument that an operator cannot take. Reads shapes and dtypes, never a value."""

from types import EllipsisType

import torch
from torch import Tensor

INDEX = (torch.int64, torch.int32)


def check_tensor(
    op: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int | EllipsisType | None, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
) -> None:
    """Raise a ValueError that names the operator, the argument, what it is and what is allowed.

    Args:
        op, name: of the operator and of its argument.
        tensor: the argument.
        shape: what its shape has to be; None is any size, `...` in front any leading dimensions.
        dtype: what its dtype has to be, or one of several; None is any floating-point one.
    """
    sizes, have = shape, tensor.shape
    if shape[:1] == (...,):
        sizes, have = shape[1:], have[max(0, len(have) - len(shape) + 1) :]
    fits = len(have) == len(sizes)
    for want, size in zip(sizes, have, strict=False):
        if want is not None and want != size:
            fits = False
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    if fits and (tensor.dtype in dtypes if dtypes else tensor.is_floating_point()):
        return
    allowed = ", ".join({None: "any", ...: "..."}.get(size, str(size)) for size in shape)
    raise ValueError(
        f"{op}: {name} is {_dtype_name(tensor.dtype)} {list(tensor.shape)}; allowed is "
        f"{' or '.join(map(_dtype_name, dtypes)) if dtypes else 'any float'} [{allowed}]"
    )


def check_tensors(op: str, shape: tuple[int | None, ...], dtype: torch.dtype, **tensors: Tensor) -> None:
    """`check_tensor` of several arguments of one shape and dtype, by name."""
    for name, tensor in tensors.items():
        check_tensor(op, name, tensor, shape, dtype)


def check_rows(op: str, rows: int, **tensors: Tensor) -> None:
    """`check_tensor` of one number per row, by the names that parameters of sampling have everywhere."""
    for name, tensor in tensors.items():
        check_tensor(op, name, tensor, (rows,), _ROW_DTYPES[name])


def check_cache(op: str, k_cache: Tensor, v_cache: Tensor, kv_scales: Tensor | None, head_dim: int | None = None) -> None:
    """Raise unless the two are a paged KV cache `[blocks, block_size, KV, D]` of one dtype, with scales where it is fp8."""
    check_tensor(op, "k_cache", k_cache, (None, None, None, head_dim))
    if 0 in k_cache.shape[1:]:
        raise ValueError(f"{op}: k_cache is {list(k_cache.shape)}; allowed is [blocks, block_size, KV, D] with each ≥ 1")
    check_tensor(op, "v_cache", v_cache, tuple(k_cache.shape), k_cache.dtype)
    if k_cache.dtype.itemsize == 1:
        if kv_scales is None:
            raise ValueError(f"{op}: a KV cache of {k_cache.dtype} needs kv_scales [2, KV]")
        check_tensor(op, "kv_scales", kv_scales, (2, k_cache.shape[2]), torch.float32)


_ROW_DTYPES = {name: torch.float32 for name in ("temperature", "top_p", "min_p")} | {
    name: torch.int64 for name in ("top_k", "seed", "position", "base", "method")
}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
