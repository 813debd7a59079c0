"""Matrix product of decode rows with a weight, with an option that makes each row's bits independent of the row count.

A BLAS picks another blocking for 4 rows than for 1, so the same row can round differently; greedy speculative text then
differs from plain text at near ties. `invariant` computes each row as the product a one-row call would make; on CUDA that is
a Triton kernel with a fixed tile, and without it the library's product. Products with int8 weights (`linear_int8`) are always
invariant.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from stepgraph.kernels.checks import check_tensor
from stepgraph.kernels.linear_int8 import linear_int8_reference, pack_int8, packed_int8_product
from stepgraph.kernels.registry import implementation, learns, register

TILE = 8  # rows of a packed product on the CPU; oneDNN takes as long for one row


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


@dataclass(frozen=True)
class Packed:
    """A weight once more in the order in which oneDNN reads it, and what it was made from: an alias of the weight, which keeps
    its memory from being given to another, and the weight's version.
    """

    weight: Tensor
    source: Tensor
    version: int

    def __reduce__(self):
        # oneDNN's order cannot be copied or saved; what goes out is empty, of a type that every `torch.load` takes.
        return set, ()


def pack(weight: Tensor) -> bool:
    """Keep beside a CPU weight `[N, K]` what makes `linear_cpu` fast with it; says whether this processor can.

    On two cores (AVX-512), all products of the embedded model take 0.6 of the time at 1 to 32 rows in float32, and in bfloat16,
    where 8 rows cost what 1 costs. It takes the weight's memory once more. A weight that is changed in place, moved or replaced
    is packed no more. A write that torch does not count goes unseen: through `.data`, NumPy or a fused optimizer.
    """
    if weight.dim() != 2 or weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16, torch.int8):
        return False
    if packed_form(weight) is not None:
        return True
    source = weight.detach()
    try:
        if weight.dtype == torch.int8:
            packed = pack_int8(source)
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(source, TILE)
    except (AttributeError, RuntimeError):  # no oneDNN in this build, or no bfloat16 in this processor
        packed = None
    if packed is not None:
        weight.packed = Packed(packed, source, weight._version)
    return packed is not None


def packed_form(weight: Tensor) -> Tensor | None:
    """What `pack` kept beside a weight, unless the weight is another by now."""
    packed = getattr(weight, "packed", None)
    if not isinstance(packed, Packed):
        return None
    if packed.source.is_set_to(weight) and packed.version == weight._version:
        return packed.weight
    weight.packed = None  # the weight is another by now, and the memory goes back
    return None


def packed_product(rows: Tensor, packed: Tensor, bias: Tensor | None, invariant: bool) -> Tensor:
    """`rows [M, K]` times a packed weight. With `invariant`, tiles of `TILE` rows, the last one filled up: every row comes out
    of the same product, whichever rows there are beside it.
    """
    count, product = rows.shape[0], torch.ops.mkldnn._linear_pointwise.default
    if not invariant or count == TILE:
        return product(rows, packed, bias, "none", [], "")
    # What fills a tile up reaches no row that is kept, so it may be anything.
    tiles = rows.new_empty((-(-count // TILE) * TILE, rows.shape[1]))
    tiles[:count] = rows
    if count < TILE:
        return product(tiles, packed, bias, "none", [], "")[:count]
    return torch.cat([product(tile, packed, bias, "none", [], "") for tile in tiles.split(TILE)])[:count]


def linear_cpu(x: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool, scale: Tensor | None = None) -> Tensor:
    """Same contract. A weight that was packed goes through oneDNN. Of others, a few float32 rows go through the BLAS with the
    weight as its left operand, the way it is stored: on two cores that takes 0.4 of the time at 2 to 4 rows and 0.9 at 256.
    """
    rows = x.reshape(-1, x.shape[-1])
    packed, count = packed_form(weight), rows.shape[0]
    if scale is not None:
        fast = packed is not None and count
        return packed_int8_product(x, packed, bias, scale) if fast else linear_int8_reference(x, weight, bias, scale)
    # oneDNN's product has no gradient, and reads a bias as if its values were side by side.
    if packed is not None and count and not learns(x, weight, bias):
        out = packed_product(rows.contiguous(), packed, None if bias is None else bias.contiguous(), invariant)
        return out.view(*x.shape[:-1], weight.shape[0])
    if invariant or x.dtype != torch.float32 or count < 2:
        return linear_reference(x, weight, bias, invariant)
    out = (weight @ rows.t()).t().contiguous()
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
