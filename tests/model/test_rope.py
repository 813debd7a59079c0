"""Rotary tables of every scaling, against transformers' own."""

import pytest
import torch
from oracles import rope_parameters
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from stepgraph.model.config import RopeConfig
from stepgraph.model.rope import inverse_frequencies, rope_table

ROPES = {
    "default": RopeConfig(),
    "default-qwen": RopeConfig(theta=1_000_000.0),
    "linear": RopeConfig(type="linear", factor=4.0),
    "llama-3.1": RopeConfig(theta=500_000.0, type="llama3", factor=8.0, original_max_position=8192),
    "llama-3.2": RopeConfig(theta=500_000.0, type="llama3", factor=32.0, original_max_position=8192),
    "llama3-narrow": RopeConfig(type="llama3", factor=3.0, original_max_position=64, low_freq_factor=2.0, high_freq_factor=3.0),
    "yarn": RopeConfig(type="yarn", factor=4.0, original_max_position=4096),
    "yarn-qwen": RopeConfig(theta=1_000_000.0, type="yarn", factor=4.0, original_max_position=32_768),
    "yarn-betas": RopeConfig(type="yarn", factor=8.0, original_max_position=2048, beta_fast=16.0, beta_slow=2.0),
    "yarn-not-truncated": RopeConfig(type="yarn", factor=4.0, original_max_position=4096, truncate=False),
    "yarn-attention-factor": RopeConfig(type="yarn", factor=4.0, original_max_position=4096, attention_factor=0.7),
    "yarn-mscale": RopeConfig(type="yarn", factor=40.0, original_max_position=4096, mscale=0.9, mscale_all_dim=0.5),
    "yarn-one-mscale": RopeConfig(type="yarn", factor=40.0, original_max_position=4096, mscale=0.9),
    "yarn-short": RopeConfig(type="yarn", factor=2.0, original_max_position=8),
}


def transformers_config(rope: RopeConfig, head_dim: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=131_072,
        rope_parameters=rope_parameters(rope),
    )


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_inverse_frequencies_equal_transformers(name, head_dim):
    rope = ROPES[name]
    config = transformers_config(rope, head_dim)
    default = LlamaRotaryEmbedding.compute_default_rope_parameters
    expected, expected_factor = ROPE_INIT_FUNCTIONS.get(rope.type, default)(config)
    found, factor = inverse_frequencies(head_dim, rope)
    assert factor == pytest.approx(expected_factor, rel=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ROPES)
def test_table_equals_transformers(name):
    rope, head_dim, length = ROPES[name], 64, 300
    theirs = LlamaRotaryEmbedding(transformers_config(rope, head_dim))
    cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
    table = rope_table(head_dim, rope, length)
    assert table.shape == (length, head_dim)
    # The two halves of transformers' cos and sin repeat each other. An angle near 300 has an ulp of 3e-5.
    expected = torch.cat([cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]], dim=-1)
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-4)


def test_scalings_differ():
    """The cases above have power: no two give the same frequencies and factor."""
    seen = [(*inverse_frequencies(64, rope)[0].tolist(), inverse_frequencies(64, rope)[1]) for rope in ROPES.values()]
    assert len(set(seen)) == len(ROPES)
