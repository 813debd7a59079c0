"""Matrix product with int8 weights: activations are rounded to int8 row by row, and the products are summed as integers.

    s_x = max |x| / 127,  q_x = round(x · 127 / max |x|)      for each row
    y = (Σ q_x q_w) · s_w · s_x                               for each output

(symmetric absmax quantisation, as of LLM.int8(), Dettmers et al. 2022, without its outlier columns). The integers are exact, so
a row's bits do not depend on the rows beside it, nor on who sums them.
"""

import torch
from torch import Tensor

LEVELS = 127.0


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """`[N, K]` -> int8 `[N, K]` and float32 `scale [N]`, so that `weight ≈ int8 * scale[:, None]`; a row of zeros stays one.

    Raises:
        ValueError: a weight that is not finite.
    """
    wide = weight.detach().float()
    if not wide.isfinite().all():
        raise ValueError("weight has a value that is not finite; int8 has none such")
    scale = wide.abs().amax(1) / LEVELS
    return torch.round(wide / scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).to(torch.int8), scale


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x [M, K]` -> int8 `[M, K]` and float32 `scale [M, 1]`. A row that is not finite gets a scale that is not."""
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True)
    # A number over a tensor would be the number times a reciprocal, which rounds twice.
    factor = torch.full_like(largest, LEVELS) / largest.clamp(min=torch.finfo(torch.float32).tiny)
    steps = (wide * factor).round()
    return torch.where(steps.isfinite(), steps, 0.0).to(torch.int8), largest / LEVELS


def linear_int8_reference(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor) -> Tensor:
    """`x [..., K]`, int8 `weight [N, K]`, `scale [N]`, `bias [N]` or None -> `[..., N]` in x's dtype; any device."""
    rows, row_scale = quantize_rows(x.reshape(-1, x.shape[-1]))
    # float64 holds the integers exactly; products of integers are not to be had on every device.
    sums = rows.double() @ weight.double().T
    return rescale(sums.float() * scale, row_scale, bias, x)


def rescale(out: Tensor, row_scale: Tensor, bias: Tensor | None, like: Tensor) -> Tensor:
    """`out [M, N]` times `row_scale [M, 1]`, plus a bias, in the dtype and with the leading shape of `like`."""
    out = out * row_scale
    if bias is not None:
        out = out + bias.float()
    return out.to(like.dtype).view(*like.shape[:-1], out.shape[1])
