"""A weight once more in the order in which the CPU's products read it: kept beside it, for as long as it is the same."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from stepgraph.kernels.memory import zeros

OUTPUTS = 4  # that a product reads the weights of in turns
OFFSET = 128  # added to 8-bit activations: the fast instructions want them without a sign
MAX_INT8_INPUTS = (2**31 - 1) // (127 * 128)  # whose products have a sum that is an int32, whatever they are


@dataclass(frozen=True)
class Packed:
    """A weight `[N, K]`, step by step: `steps [ceil(N / 4), ceil(K / s), 4, s]` for s values in a step, filled up with zeros.

    Attributes:
        steps: what a product reads, from one end to the other.
        offsets: of int8 weights `[N]` int32, `OFFSET` times the sum of an output's weights: what the shifted activations add
            to its products.
        source: an alias of the weight, which keeps its memory from being given to another.
        version: of the weight, and of the alias: torch's count of changes in place.
    """

    steps: Tensor
    offsets: Tensor | None
    source: Tensor
    version: int

    def __reduce__(self):
        # Copies and files are of the weight alone; what goes out is empty, of a type that every `torch.load` takes.
        return set, ()


def pack(*weights: Tensor) -> bool:
    """Keep beside CPU weights `[N, K]` of float32, bfloat16 or int8 what makes `linear` fast with them, as far as there are
    compiled products for them; says whether there are for all.

    It takes the weights' memory once more, side by side in the order given, which best is the order of use; it goes back when
    none of them needs it. A weight that is changed in place, moved or replaced is packed no more. A write that torch does not
    count goes unseen: through `.data`, NumPy or a fused optimizer. Of an inference tensor it counts none, so that one is not
    packed.
    """
    able = [weight for weight in weights if _can_be_packed(weight)]
    wanted = [weight for weight in able if packed_form(weight) is None]
    shapes = [_shape(weight) for weight in wanted]
    sizes = [math.prod(shape) * weight.itemsize for shape, weight in zip(shapes, wanted, strict=True)]
    memory = zeros([sum(sizes)], torch.uint8).split(sizes)
    for weight, shape, part in zip(wanted, shapes, memory, strict=True):
        source, (outer, inner) = weight.detach(), weight.shape
        steps = part.view(weight.dtype).view(shape)
        filled = padded(source, (0, shape[1] * shape[3] - inner, 0, shape[0] * OUTPUTS - outer))
        steps.copy_(filled.view(shape[0], OUTPUTS, shape[1], shape[3]).transpose(1, 2))
        offsets = OFFSET * source.sum(1, dtype=torch.int32) if weight.dtype == torch.int8 else None
        weight.packed = Packed(steps, offsets, source, weight._version)
    return len(able) == len(weights)


def _can_be_packed(weight: Tensor) -> bool:
    if weight.dim() != 2 or weight.numel() == 0 or weight.device.type != "cpu" or weight.is_inference():
        return False
    return values_in_step(weight.dtype) > 0 and not (weight.dtype == torch.int8 and weight.shape[1] > MAX_INT8_INPUTS)


def _shape(weight: Tensor) -> tuple[int, int, int, int]:
    """Of its `Packed.steps`."""
    values = values_in_step(weight.dtype)
    return -(-weight.shape[0] // OUTPUTS), -(-weight.shape[1] // values), OUTPUTS, values


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
    # A shallow copy (`copy.copy`) has this object too, and another count of changes to the same memory.
    same = packed.source.is_set_to(weight) and not weight.is_inference()
    if same and packed.version == weight._version == packed.source._version:
        return packed
    weight.packed = None  # the weight is another by now, and the memory goes back
    return None
