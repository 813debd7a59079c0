"""Gated activation of the MLP: silu_mul([gate, up]) = gate * sigmoid(gate) * up (Shazeer 2020, SwiGLU)."""

import torch
from torch import Tensor

from stepgraph.kernels.checks import check_tensor
from stepgraph.kernels.registry import register


def check_silu_mul(gate_up: Tensor) -> None:
    """Raise a ValueError where `silu_mul` has no meaning."""
    check_tensor("silu_mul", "gate_up", gate_up, (..., None))
    if gate_up.shape[-1] % 2 or gate_up.shape[-1] == 0:
        raise ValueError(f"silu_mul: gate_up is {list(gate_up.shape)}; allowed is [..., 2 I] with I ≥ 1")


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    """`gate_up [..., 2 I]` (gate first) -> `[..., I]`."""
    gate, up = gate_up.contiguous().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


silu_mul = register(
    "silu_mul(Tensor gate_up) -> Tensor",
    reference=silu_mul_reference,
    numba="stepgraph.kernels.activation_numba:silu_mul_numba",
    triton="stepgraph.kernels.activation_triton:silu_mul_triton",
    fake=lambda gate_up: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
    check=check_silu_mul,
)
