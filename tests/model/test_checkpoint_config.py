"""`config.json` -> ModelConfig: both rope spellings, family defaults, and what is refused."""

import pytest

from stepgraph.model.checkpoint.config import config_from_hf
from stepgraph.model.checkpoint.errors import CheckpointError
from stepgraph.model.config import RopeConfig

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, RopeConfig(theta=5e5)),
        ({"type": "linear", "factor": 2}, RopeConfig(theta=5e5, type="linear", factor=2.0)),
        (
            {"rope_type": "llama3", "original_max_position_embeddings": 1024, **LLAMA3},
            RopeConfig(theta=5e5, type="llama3", factor=8.0, original_max_position=1024),
        ),
        # transformers takes the scaled length where the original is missing
        ({"rope_type": "llama3", **LLAMA3}, RopeConfig(theta=5e5, type="llama3", factor=8.0, original_max_position=4096)),
        (
            {"type": "yarn", "factor": 4.0, "beta_fast": None, "beta_slow": 2, "truncate": False, "mscale": 0.7},
            RopeConfig(
                theta=5e5, type="yarn", factor=4.0, original_max_position=4096, beta_slow=2.0, truncate=False, mscale=0.7
            ),
        ),
        # a missing yarn factor is the ratio of the lengths
        (
            {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 1024, "attention_factor": 1.1},
            RopeConfig(theta=5e5, type="yarn", factor=4.0, original_max_position=1024, attention_factor=1.1),
        ),
    ],
)
def test_both_rope_spellings(scaling, expected):
    old = config_from_hf({**BASE, "rope_theta": 500_000, "rope_scaling": scaling})
    new = config_from_hf({**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000, **(scaling or {})}})
    assert old.rope == expected
    if scaling is None or "rope_type" in scaling:
        assert new.rope == expected


def test_original_length_beside_the_rotary_wins():
    scaling = {"rope_type": "llama3", "original_max_position_embeddings": 64, **LLAMA3}
    config = config_from_hf({**BASE, "original_max_position_embeddings": 128, "rope_scaling": scaling})
    assert config.rope.original_max_position == 128


def test_llama_defaults():
    config = config_from_hf(BASE)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 8, 1e-6)
    assert not any((config.tie_embeddings, config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))
    assert (config.bos_token_id, config.eos_token_ids, config.layer_windows) == (1, (2,), (0, 0, 0, 0))


def test_family_biases_and_norms():
    llama = config_from_hf({**BASE, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    qwen = {"num_key_value_heads": 2, "num_hidden_layers": 4}
    qwen2 = config_from_hf({**BASE, **qwen, "model_type": "qwen2"})
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias, qwen2.qk_norm, qwen2.head_dim) == (True, False, False, False, 8)
    qwen3 = config_from_hf({**BASE, **qwen, "model_type": "qwen3"})
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 16}, (0, 0, 0, 0)),
        ({"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}, (0, 0, 0, 0)),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}, (0, 0, 0, 16)),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (0, 0, 0, 0)),
        (
            {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (16, 0, 16, 0),
        ),
    ],
)
def test_qwen_sliding_windows(fields, windows):
    assert config_from_hf({**BASE, "model_type": "qwen2", "num_key_value_heads": 2, **fields}).layer_windows == windows


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (5, None, (5,)),
        ([5, 6], {"eos_token_id": 6}, (5, 6)),
        (5, {"eos_token_id": [7, 5]}, (5, 7)),
        (None, {"eos_token_id": 9}, (9,)),
        (None, {}, ()),
    ],
)
def test_eos_ids_are_merged(eos, generation, expected):
    assert config_from_hf({**BASE, "eos_token_id": eos}, generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "gemma2"}, "model_type is 'gemma2'; allowed: llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: silu"),
        ({"vocab_size": None}, "vocab_size is None; allowed is an integer"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; allowed is a number above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; allowed: 1"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type is 'dynamic'; allowed: default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type is 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is None"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor is 4.0"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "an entry for 'full_attention'"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries; allowed is num_hidden_layers, 4"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is 'sliding_attention'; allowed: full_attention"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set"),
    ],
)
def test_unsupported_fields_are_named(fields, message):
    with pytest.raises(CheckpointError) as error:
        config_from_hf({**BASE, **fields})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
