"""Matrix product of decode rows with a weight, with an option that makes each row's bits independent of the row count.

A BLAS picks another blocking for 4 rows than for 1, so the same row can round differently; greedy speculative text then
differs from plain text at near ties. `invariant` computes each row as the product a one-row call would make; on CUDA that is
a Triton kernel with a fixed tile, and without it the library's product. Products with int8 weights (`linear_int8`) and compiled
ones with packed weights (`product_numba`) are always invariant.
"""

import torch
from torch import Tensor

from stepgraph.kernels.checks import check_tensor
from stepgraph.kernels.linear_int8 import linear_int8_reference
from stepgraph.kernels.registry import implementation, register


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool = True, scale: Tensor | None = None) -> None:
    """Raise a ValueError where `linear` has no meaning."""
    check_tensor("linear", "x", x, (..., None))
    check_tensor("linear", "weight", weight, (None, x.shape[-1]), x.dtype if scale is None else torch.int8)
    if weight.shape[1] == 0:
        raise ValueError(f"linear: weight is {list(weight.shape)}; allowed is [N, K] with K ≥ 1")
    if bias is not None:
        check_tensor("linear", "bias", bias, (weight.shape[0],), x.dtype)
    if scale is not None:
        check_tensor("linear", "scale", scale, (weight.shape[0],), torch.float32)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool, scale: Tensor | None = None) -> Tensor:
    """`x [..., K]`, `weight [N, K]`, `bias [N]` or None -> `[..., N]` in x's dtype. A weight with a `scale [N]` is int8."""
    if scale is not None:
        return linear_int8_reference(x, weight, bias, scale)
    if not invariant:
        return torch.nn.functional.linear(x, weight, bias)
    if x.numel() == 0:
        return torch.nn.functional.linear(x, weight, bias)
    rows = x.reshape(-1, 1, x.shape[-1])
    # Each row is copied out first: an unaligned row could take another path through the BLAS than an aligned one.
    out = torch.cat([torch.nn.functional.linear(row.clone(), weight, bias) for row in rows])
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool, scale: Tensor | None = None) -> Tensor:
    """Same contract. A few float32 rows go through the BLAS with the weight as its left operand, the way it is stored: on two
    cores that takes 0.4 of the time at 2 to 4 rows and 0.9 at 256.
    """
    count = x.numel() // x.shape[-1]
    if invariant or scale is not None or x.dtype != torch.float32 or count < 2:
        return linear_reference(x, weight, bias, invariant, scale)
    out = (weight @ x.reshape(count, -1).t()).t().contiguous()
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


def linear_library(x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool = False) -> Tensor:
    """The library's product, whose rows may depend on their number."""
    return torch.nn.functional.linear(x, weight, bias)


def linear_cuda(x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool, scale: Tensor | None = None) -> Tensor:
    """The library's product, or the fixed-tile kernel where invariance is asked for; int8 weights have no kernel here yet."""
    if scale is not None:
        return linear_int8_reference(x, weight, bias, scale)
    product = implementation("linear", "triton") if invariant else linear_library
    return product(x, weight, bias, invariant)


linear = register(
    "linear(Tensor x, Tensor weight, Tensor? bias, bool invariant, Tensor? scale=None) -> Tensor",
    reference=linear_reference,
    cpu=linear_cpu,
    numba="stepgraph.kernels.linear_numba:linear_numba",
    cuda=linear_cuda,
    triton="stepgraph.kernels.linear_triton:linear_triton",
    fake=lambda x, weight, bias, invariant, scale=None: x.new_empty((*x.shape[:-1], weight.shape[0])),
    check=check_linear,
)
