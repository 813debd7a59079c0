"""Shapes of public models, and the launches a step of each makes: what the compile gate compiles and benchmarks sweep."""

from dataclasses import dataclass

import torch

from stepgraph.kernels.launch import LaunchSpec, Target, record_launches


@dataclass(frozen=True)
class ModelShape:
    """What decides the kernels of one model; `window` and `softcap` are 0 where the model has none."""

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


# The presets of the model floor, which this floor may not import, then shapes that have what no preset has: a group of 5, a
# head of 80, a sliding window, a head of 256 with a soft-cap.
MODEL_SHAPES = (
    ModelShape("llama-3.1-8b", 32, 8, 128, 4096, 14_336, 128_256),
    ModelShape("llama-3.2-1b", 32, 8, 64, 2048, 8192, 128_256),
    ModelShape("llama-3.2-3b", 24, 8, 128, 3072, 8192, 128_256),
    ModelShape("qwen3-0.6b", 16, 8, 128, 1024, 3072, 151_936, qk_norm=True),
    ModelShape("qwen3-1.7b", 16, 8, 128, 2048, 6144, 151_936, qk_norm=True),
    ModelShape("qwen3-8b", 32, 8, 128, 4096, 12_288, 151_936, qk_norm=True),
    ModelShape("qwen2.5-0.5b", 14, 2, 64, 896, 4864, 151_936, qkv_bias=True),
    ModelShape("qwen2.5-7b", 28, 4, 128, 3584, 18_944, 152_064, qkv_bias=True),
    ModelShape("smollm2-135m", 9, 3, 64, 576, 1536, 49_152),
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


def step_launches(
    shape: ModelShape,
    target: Target,
    *,
    batch: int,
    query_len: int,
    block_size: int = 16,
    max_len: int = 8192,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
) -> list[LaunchSpec]:
    """Every launch of one layer, the head, look-up, sampling and commit, recorded from launchers on tensors without storage."""
    from stepgraph.kernels.activation_triton import silu_mul_triton
    from stepgraph.kernels.advance_triton import advance_triton
    from stepgraph.kernels.attention.launcher import uniform_decode_attention_triton
    from stepgraph.kernels.linear_triton import linear_triton
    from stepgraph.kernels.logprobs_triton import record_logprobs_triton
    from stepgraph.kernels.ngram_triton import ngram_propose_triton
    from stepgraph.kernels.norm_triton import add_rms_norm_triton, rms_norm_triton
    from stepgraph.kernels.rejection.launcher import rejection_sample_triton
    from stepgraph.kernels.rope_kv_triton import rope_kv_write_triton
    from stepgraph.kernels.sampling_triton import draw_triton, token_law_triton
    from stepgraph.kernels.transforms_triton import transform_logits_triton

    def empty(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    cache_dtype = cache_dtype or dtype
    table_width = -(-max_len // block_size)
    qkv_size = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    x, weight = empty(batch, query_len, shape.hidden), empty(shape.hidden)
    lengths = empty(batch, dtype=torch.int64)
    table = empty(batch, table_width, dtype=torch.int64)
    positions = empty(batch, query_len, dtype=torch.int64)
    cache = empty(batch * table_width + 1, block_size, shape.kv_heads, shape.head_dim, dtype=cache_dtype)
    head_norm = empty(shape.head_dim) if shape.qk_norm else None
    scales = empty(2, shape.kv_heads, dtype=torch.float32) if cache_dtype.itemsize == 1 else None
    rope = empty(max_len, shape.head_dim, dtype=torch.float32)
    slots, k_max = batch + 1, 8
    history, counts = empty(slots, max_len, dtype=torch.int64), empty(slots, dtype=torch.int64)
    at_position, stop_ids = empty(slots, k_max, dtype=torch.int64), empty(slots, 8, dtype=torch.int64)
    live = empty(batch, dtype=torch.bool)
    with record_launches(target) as specs:
        rms_norm_triton(x, weight, 1e-5)
        add_rms_norm_triton(x, x, weight, 1e-5)
        qkv = linear_triton(x, empty(qkv_size, shape.hidden), empty(qkv_size) if shape.qkv_bias else None)
        q = rope_kv_write_triton(qkv, positions, rope, positions, cache, cache, head_norm, head_norm, shape.heads, 1e-5, scales)
        attended = uniform_decode_attention_triton(
            q, cache, cache, table, lengths, shape.head_dim**-0.5, shape.window, shape.softcap, scales
        )
        linear_triton(attended.flatten(2), empty(shape.hidden, shape.heads * shape.head_dim), None)
        gate_up = linear_triton(x, empty(2 * shape.intermediate, shape.hidden), None)
        linear_triton(silu_mul_triton(gate_up), empty(shape.hidden, shape.intermediate), None)
        linear_triton(x, empty(shape.vocab, shape.hidden), None)
        for matches in ((1, 3), (2, 4)):  # what the tests use, and the drafter's default
            ngram_propose_triton(history, lengths, lengths, max(query_len - 1, 1), *matches)
        per_row, per_slot = [lengths, live, positions, lengths, lengths, lengths], [counts, counts, history, counts, counts]
        results = empty(batch, 5 + k_max + 1, dtype=torch.int64)
        advance_triton(*per_row, *per_slot, at_position, at_position, counts, results, stop_ids, counts)
        if query_len > k_max + 1:
            return specs  # a prefill chunk samples nothing

        logits, drafts = empty(batch, query_len, shape.vocab), empty(batch, query_len - 1, dtype=torch.int64)
        floats, real = empty(batch, dtype=torch.float32), empty(slots, dtype=torch.float32)
        biases, values = empty(slots, 128, dtype=torch.int64), empty(slots, 128, dtype=torch.float32)
        flags = empty(slots, dtype=torch.bool)
        transforms = (history, flags, counts, counts, real, real, real, biases, values, stop_ids)
        transform_logits_triton(logits, drafts, lengths, lengths, *transforms)
        sampling = (floats, lengths, floats, floats)
        law = token_law_triton(logits[:, 0].contiguous(), *sampling)
        draw_triton(law, lengths, lengths, lengths, 0)
        rates = empty(batch, k_max, dtype=torch.float32)
        for laws in (None, empty(batch, query_len - 1, shape.vocab, dtype=torch.float32)):
            rejection_sample_triton(logits, drafts, laws, *sampling, lengths, lengths, lengths, rates)
        record_logprobs_triton(logits, positions, lengths, lengths, flags, counts, empty(slots, max_len, dtype=torch.float32))
    return specs
