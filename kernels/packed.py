"""A weight once more in the order in which the CPU's products read it: kept beside it, for as long as it is the same."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

OUTPUTS = 4  # that a product reads the weights of in turns
OFFSET = 128  # added to 8-bit activations: the fast instructions want them without a sign


@dataclass(frozen=True)
class Packed:
    """A weight `[N, K]`, step by step: `steps [ceil(N / 4), ceil(K / s), 4, s]` for s values in a step, filled up with zeros.

    Attributes:
        steps: what a product reads, from one end to the other.
        offsets: of int8 weights `[N]` int32, `OFFSET` times the sum of an output's weights: what the shifted activations add
            to its products.
        source: an alias of the weight, which keeps its memory from being given to another.
        version: of the weight.
    """

    steps: Tensor
    offsets: Tensor | None
    source: Tensor
    version: int

    def __reduce__(self):
        # Copies and files are of the weight alone; what goes out is empty, of a type that every `torch.load` takes.
        return set, ()


def pack(weight: Tensor) -> bool:
    """Keep beside a CPU weight `[N, K]` of float32, bfloat16 or int8 what makes `linear` fast with it; says whether there are
    compiled products here.

    It takes the weight's memory once more. A weight that is changed in place, moved or replaced is packed no more. A write that
    torch does not count goes unseen: through `.data`, NumPy or a fused optimizer.
    """
    if weight.dim() != 2 or weight.numel() == 0 or weight.device.type != "cpu":
        return False
    values = values_in_step(weight.dtype)
    if values == 0:
        return False
    if packed_form(weight) is None:
        source = weight.detach()
        outer, inner = weight.shape
        steps = padded(source, (0, -inner % values, 0, -outer % OUTPUTS))
        steps = steps.view(-(-outer // OUTPUTS), OUTPUTS, -1, values).transpose(1, 2).contiguous()
        offsets = OFFSET * source.sum(1, dtype=torch.int32) if weight.dtype == torch.int8 else None
        weight.packed = Packed(steps, offsets, source, weight._version)
    return True


def values_in_step(dtype: torch.dtype) -> int:
    """Of a weight; 0 where no product is compiled for it."""
    try:
        from stepgraph.kernels.product_numba import WAYS
    except ImportError:
        return 0
    return WAYS[dtype].values if dtype in WAYS else 0


def packed_form(weight: Tensor) -> Packed | None:
    """What `pack` kept beside a weight, unless the weight is another by now."""
    packed = getattr(weight, "packed", None)
    if not isinstance(packed, Packed):
        return None
    if packed.source.is_set_to(weight) and packed.version == weight._version:
        return packed
    weight.packed = None  # the weight is another by now, and the memory goes back
    return None
