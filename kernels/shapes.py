"""Shapes of public models: what the compile gate compiles and what benchmarks sweep."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """What decides the kernels of one model; `window`, `softcap` and `draft_vocab` are 0 where there is none.

    `draft_vocab` is the reduced vocabulary of the EAGLE-3 head that is published for the model, or shipped for it.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    qk_norm: bool = False
    qkv_bias: bool = False
    window: int = 0
    softcap: float = 0.0
    draft_vocab: int = 0


# The presets of the model floor, which this floor may not import, then shapes that have what no preset has: a group of 5, a
# head of 80, a sliding window, a head of 256 with a soft-cap.
MODEL_SHAPES = (
    ModelShape("llama-3.1-8b", 32, 8, 128, 4096, 14_336, 128_256, draft_vocab=32_000),
    ModelShape("llama-3.2-1b", 32, 8, 64, 2048, 8192, 128_256),
    ModelShape("llama-3.2-3b", 24, 8, 128, 3072, 8192, 128_256),
    ModelShape("qwen3-0.6b", 16, 8, 128, 1024, 3072, 151_936, qk_norm=True),
    ModelShape("qwen3-1.7b", 16, 8, 128, 2048, 6144, 151_936, qk_norm=True),
    ModelShape("qwen3-8b", 32, 8, 128, 4096, 12_288, 151_936, qk_norm=True, draft_vocab=32_000),
    ModelShape("qwen2.5-0.5b", 14, 2, 64, 896, 4864, 151_936, qkv_bias=True),
    ModelShape("qwen2.5-7b", 28, 4, 128, 3584, 18_944, 152_064, qkv_bias=True),
    ModelShape("smollm2-135m", 9, 3, 64, 576, 1536, 49_152, draft_vocab=8192),
    ModelShape("smollm2-360m", 15, 5, 64, 960, 2560, 49_152),
    ModelShape("tiny-llama", 4, 2, 16, 64, 96, 256),
    ModelShape("tiny-qwen2", 4, 2, 16, 64, 96, 256, qkv_bias=True),
    ModelShape("tiny-qwen3", 4, 2, 16, 64, 96, 256, qk_norm=True),
    ModelShape("llama-3.1-70b", 64, 8, 128, 8192, 28_672, 128_256),
    ModelShape("qwen3-14b", 40, 8, 128, 5120, 17_408, 151_936, qk_norm=True),
    ModelShape("phi-2", 32, 32, 80, 2560, 10_240, 51_200, qkv_bias=True),
    ModelShape("mistral-7b-v0.1", 32, 8, 128, 4096, 14_336, 32_000, window=4096),
    ModelShape("gemma-2-2b", 8, 4, 256, 2304, 9216, 256_000, window=4096, softcap=50.0),
)


def shape_named(name: str) -> ModelShape:
    """The shape of that name; the error lists them."""
    by_name = {shape.name: shape for shape in MODEL_SHAPES}
    if name not in by_name:
        raise ValueError(f"no model shape {name!r}; there are {', '.join(by_name)}")
    return by_name[name]
