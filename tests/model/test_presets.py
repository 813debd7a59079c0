"""Preset shapes, against the parameter counts their authors publish."""

import pytest
import torch
from oracles import our_logits, to_transformers, transformers_logits

from stepgraph.model.presets import PRESETS, preset
from stepgraph.model.transformer import Transformer

# Unique parameters (a tied head counts once), from the models' cards and safetensors indices.
PUBLIC_COUNTS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-8b": 8_190_735_360,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
}
TINY = [name for name in PRESETS if name.startswith("tiny-")]


@pytest.mark.parametrize("name", PUBLIC_COUNTS)
def test_parameter_count_is_the_public_one(name):
    model = Transformer(preset(name), device="meta", max_positions=1)
    assert sum(weight.numel() for weight in model.parameters()) == PUBLIC_COUNTS[name]


def test_every_preset_is_tested():
    assert set(PUBLIC_COUNTS) | set(TINY) == set(PRESETS)


@pytest.mark.parametrize("name", TINY)
def test_tiny_preset_equals_transformers(name):
    model = Transformer(preset(name), dtype=torch.float64).randomize(seed=3)
    tokens = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(5))
    expected = transformers_logits(to_transformers(model), tokens)
    found = our_logits(model, tokens, query_len=7)
    # transformers takes norms and angles in float32 even here.
    assert (found - expected).abs().max() < 5e-6 * expected.abs().max()


@pytest.mark.embedded
def test_smollm2_preset_has_the_shapes_of_the_real_checkpoint(embedded):
    fields = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    fields += ("rms_norm_eps", "rope", "max_position", "tie_embeddings", "qkv_bias", "layer_windows")
    real, shapes = embedded.model.config, preset("smollm2-135m")
    assert {name: getattr(real, name) for name in fields} == {name: getattr(shapes, name) for name in fields}


def test_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match=r"'gpt-5'; there are llama-3\.1-8b, "):
        preset("gpt-5")
