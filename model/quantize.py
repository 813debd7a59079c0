"""int8 weights: what a model multiplies with, rounded to 8 bits with one scale for each output."""

import torch
from torch import nn

from stepgraph.kernels.linear_int8 import quantize_weight
from stepgraph.model.transformer import multiplied

INT8 = "int8"
WEIGHTS = (INT8,)  # what weights can be besides the dtype of the model
HELP = "int8: round what the models multiply with to 8 bits (CPU); other text than with the weights as they are"


@torch.no_grad()
def quantize_int8(model: nn.Module) -> None:
    """Replace the matrices of a `Transformer` or an `Eagle3Head` by int8 ones and set their scales; embeddings, norms and
    biases stay, and what is int8 already. Products then round activations to int8 too (`stepgraph.kernels.linear_int8`). An
    output matrix that was the embeddings becomes one of its own.

    Raises:
        ValueError: a weight is not finite.
    """
    if model.lm_head is None:
        model.lm_head = nn.Parameter(model.embed.detach(), requires_grad=False)
    chosen = {id(weight) for weight in multiplied(model) if weight.dtype != torch.int8}
    places = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module.named_parameters(recurse=False)
        if id(weight) in chosen
    ]
    # All are rounded before one is replaced, so that a bad weight leaves the model as it was.
    rounded = [quantize_weight(weight) for _, _, weight in places]
    for (module, name, _), (weight, scale) in zip(places, rounded, strict=True):
        setattr(module, name, nn.Parameter(weight, requires_grad=False))
        setattr(module, name.removesuffix("_weight") + "_scale", scale)


def is_int8(model: nn.Module) -> bool:
    """Whether `quantize_int8` has run."""
    return model.lm_head is not None and model.lm_head.dtype == torch.int8
