"""Shapes of public models, to be filled with random weights: for timing and for tests, where no checkpoint is needed.

The shapes are those of the published `config.json` files. No preset has end-of-sequence ids: with random weights they would
end a timing run at random.
"""

from stepgraph.model.config import ModelConfig, RopeConfig


def _llama3_rope(factor: float) -> RopeConfig:
    return RopeConfig(
        theta=500_000.0,
        type="llama3",
        factor=factor,
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )


def _llama3(hidden: int, inner: int, layers: int, heads: int, head_dim: int, rope_factor: float, tied: bool) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=_llama3_rope(rope_factor),
        max_position=131_072,
        tie_embeddings=tied,
    )


def _smollm2(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=49_152,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=100_000.0),
        max_position=8192,
        tie_embeddings=True,
    )


def _qwen2(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        family="qwen2",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1_000_000.0),
        max_position=32_768,
        tie_embeddings=tied,
        qkv_bias=True,
    )


def _qwen3(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1_000_000.0),
        max_position=40_960,
        tie_embeddings=tied,
        qk_norm=True,
    )


def _tiny(family: str, layers: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        family=family,
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        max_position=512,
        tie_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


PRESETS: dict[str, ModelConfig] = {
    "llama-3.1-8b": _llama3(4096, 14_336, 32, heads=32, head_dim=128, rope_factor=8.0, tied=False),
    "llama-3.2-1b": _llama3(2048, 8192, 16, heads=32, head_dim=64, rope_factor=32.0, tied=True),
    "llama-3.2-3b": _llama3(3072, 8192, 28, heads=24, head_dim=128, rope_factor=32.0, tied=True),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, heads=16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, heads=16, tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, heads=32, tied=False),
    "qwen2.5-0.5b": _qwen2(151_936, 896, 4864, 24, heads=14, kv_heads=2, head_dim=64, tied=True),
    "qwen2.5-7b": _qwen2(152_064, 3584, 18_944, 28, heads=28, kv_heads=4, head_dim=128, tied=False),
    "smollm2-135m": _smollm2(576, 1536, 30, heads=9, kv_heads=3),
    "smollm2-360m": _smollm2(960, 2560, 32, heads=15, kv_heads=5),
    "tiny-llama": _tiny("llama", layers=3, tied=True),
    "tiny-qwen2": _tiny("qwen2", layers=2, tied=False),
    "tiny-qwen3": _tiny("qwen3", layers=2, tied=True),
}


def preset(name: str) -> ModelConfig:
    """The shapes called `name`.

    Raises:
        ValueError: no preset has that name; the message lists those that exist.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset is called {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
