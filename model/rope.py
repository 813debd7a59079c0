"""Rotary position embedding tables, with the context-extension scalings of public checkpoints."""

import math

import torch
from torch import Tensor

from stepgraph.model.config import RopeConfig


def inverse_frequencies(head_dim: int, rope: RopeConfig) -> tuple[Tensor, float]:
    """Inverse frequencies `[head_dim / 2]` (float32) and the factor that multiplies cos and sin.

    `default`: θ^(−2i/D) (Su et al. 2021, RoFormer). `linear`: divided by the factor (Chen et al. 2023, position
    interpolation). `llama3`: wavelengths beyond the original context divided, a smooth blend between (Llama 3.1 release).
    `yarn`: ramp between interpolation and extrapolation by dimension, with a temperature on attention (Peng et al. 2023).
    """
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(inv_freq, rope), 1.0
    if rope.type == "yarn":
        return _yarn(inv_freq, head_dim, rope), _yarn_attention_factor(rope)
    return inv_freq, 1.0


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    wavelength = 2 * math.pi / inv_freq
    rotations = rope.original_max_position / wavelength
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)  # 0: long waves, interpolated; 1: short waves, kept
    return (1 - blend) * inv_freq / rope.factor + blend * inv_freq


def _yarn(inv_freq: Tensor, head_dim: int, rope: RopeConfig) -> Tensor:
    def dimension_of(rotations: float) -> float:
        ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    ramp = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def rope_table(head_dim: int, rope: RopeConfig, max_position: int) -> Tensor:
    """`[max_position, head_dim]` float32: cos of every frequency, then sin, for each position."""
    inv_freq, factor = inverse_frequencies(head_dim, rope)
    angles = torch.arange(max_position).float()[:, None] * inv_freq
    return torch.cat([angles.cos(), angles.sin()], dim=-1) * factor
