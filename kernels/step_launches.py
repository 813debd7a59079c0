"""Every launch that a step of a model makes, recorded from the launchers themselves on tensors without storage."""

from collections.abc import Callable

import torch
from torch import Tensor

from stepgraph.kernels.activation_triton import silu_mul_triton
from stepgraph.kernels.advance_triton import advance_triton
from stepgraph.kernels.attention.launcher import uniform_decode_attention_triton
from stepgraph.kernels.launch import LaunchSpec, Target, record_launches
from stepgraph.kernels.linear_triton import linear_triton
from stepgraph.kernels.logprobs_triton import record_logprobs_triton
from stepgraph.kernels.ngram_triton import ngram_propose_triton
from stepgraph.kernels.norm_triton import add_rms_norm_triton, rms_norm_triton
from stepgraph.kernels.rejection.launcher import rejection_sample_triton
from stepgraph.kernels.rope_kv_triton import rope_kv_write_triton
from stepgraph.kernels.sampling_triton import draw_triton, token_law_triton
from stepgraph.kernels.shapes import ModelShape
from stepgraph.kernels.transforms_triton import transform_logits_triton

K_MAX = 8  # of the state's per-position counters


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
    """Launches of one layer, the head, and of an EAGLE-3 head where the shape has one; of look-up, sampling and commit unless
    `query_len` is a prefill chunk's.
    """

    def empty(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    with record_launches(target) as specs:
        _layer(shape, empty, batch, query_len, block_size, max_len, cache_dtype or dtype)
        x = empty(batch, query_len, shape.hidden)
        linear_triton(x, empty(shape.vocab, shape.hidden), None)
        if shape.draft_vocab:
            linear_triton(empty(batch, query_len, 3 * shape.hidden), empty(shape.hidden, 3 * shape.hidden), None)
            _layer(shape, empty, batch, query_len, block_size, max_len, cache_dtype or dtype, inputs=2)
            linear_triton(x, empty(shape.draft_vocab, shape.hidden), None)
        if query_len <= K_MAX + 1:  # a prefill chunk drafts, samples and commits nothing
            _look_up_and_commit(empty, batch, query_len, max_len)
            _sampling(shape, empty, batch, query_len, max_len)
    return specs


def _layer(
    shape: ModelShape,
    empty: Callable[..., Tensor],
    batch: int,
    query_len: int,
    block_size: int,
    max_len: int,
    cache_dtype: torch.dtype,
    inputs: int = 1,
) -> None:
    """A decoder layer; its attention reads `inputs` hidden states side by side."""
    table_width = -(-max_len // block_size)
    qkv_size = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    x, weight = empty(batch, query_len, shape.hidden), empty(shape.hidden)
    lengths, table = empty(batch, dtype=torch.int64), empty(batch, table_width, dtype=torch.int64)
    positions = empty(batch, query_len, dtype=torch.int64)
    cache = empty(batch * table_width + 1, block_size, shape.kv_heads, shape.head_dim, dtype=cache_dtype)
    head_norm = empty(shape.head_dim) if shape.qk_norm else None
    scales = empty(2, shape.kv_heads, dtype=torch.float32) if cache_dtype.itemsize == 1 else None
    rope = empty(max_len, shape.head_dim, dtype=torch.float32)

    rms_norm_triton(x, weight, 1e-5)
    add_rms_norm_triton(x, x, weight, 1e-5)
    wide = x if inputs == 1 else empty(batch, query_len, inputs * shape.hidden)
    bias = empty(qkv_size) if shape.qkv_bias else None
    qkv = linear_triton(wide, empty(qkv_size, inputs * shape.hidden), bias)
    q = rope_kv_write_triton(qkv, positions, rope, positions, cache, cache, head_norm, head_norm, shape.heads, 1e-5, scales)
    attended = uniform_decode_attention_triton(
        q, cache, cache, table, lengths, shape.head_dim**-0.5, shape.window, shape.softcap, scales
    )
    linear_triton(attended.flatten(2), empty(shape.hidden, shape.heads * shape.head_dim), None)
    gate_up = linear_triton(x, empty(2 * shape.intermediate, shape.hidden), None)
    linear_triton(silu_mul_triton(gate_up), empty(shape.hidden, shape.intermediate), None)


def _look_up_and_commit(empty: Callable[..., Tensor], batch: int, query_len: int, max_len: int) -> None:
    slots = batch + 1
    lengths, counts = empty(batch, dtype=torch.int64), empty(slots, dtype=torch.int64)
    history = empty(slots, max_len, dtype=torch.int64)
    positions, live = empty(batch, query_len, dtype=torch.int64), empty(batch, dtype=torch.bool)
    at_position, stop_ids = empty(slots, K_MAX, dtype=torch.int64), empty(slots, 8, dtype=torch.int64)
    for matches in ((1, 3), (2, 4)):  # what the tests use, and the drafter's default
        ngram_propose_triton(history, lengths, lengths, max(query_len - 1, 1), *matches)
    per_row, per_slot = [lengths, live, positions, lengths, lengths, lengths], [counts, counts, history, counts, counts]
    results = empty(batch, 5 + K_MAX + 1, dtype=torch.int64)
    advance_triton(*per_row, *per_slot, at_position, at_position, counts, results, stop_ids, counts)


def _sampling(shape: ModelShape, empty: Callable[..., Tensor], batch: int, query_len: int, max_len: int) -> None:
    """Transforms, draft draws, rejection with each kind of draft law, log-probabilities."""
    slots, k = batch + 1, query_len - 1
    lengths, counts = empty(batch, dtype=torch.int64), empty(slots, dtype=torch.int64)
    history, stop_ids = empty(slots, max_len, dtype=torch.int64), empty(slots, 8, dtype=torch.int64)
    logits, drafts = empty(batch, query_len, shape.vocab), empty(batch, k, dtype=torch.int64)
    floats, real = empty(batch, dtype=torch.float32), empty(slots, dtype=torch.float32)
    biases, values = empty(slots, 128, dtype=torch.int64), empty(slots, 128, dtype=torch.float32)
    flags, rates = empty(slots, dtype=torch.bool), empty(batch, K_MAX, dtype=torch.float32)
    transforms = (history, flags, counts, counts, real, real, real, biases, values, stop_ids)
    transform_logits_triton(logits, drafts, lengths, lengths, *transforms)
    sampling = (floats, lengths, floats, floats)
    vocabularies = [shape.vocab, shape.draft_vocab] if shape.draft_vocab else [shape.vocab]
    for vocab in vocabularies:
        law = token_law_triton(empty(batch, vocab), *sampling)
        draw_triton(law, lengths, lengths, lengths, 0)
    rejection_sample_triton(logits, drafts, None, *sampling, lengths, lengths, lengths, rates)
    for vocab in vocabularies:
        laws = empty(batch, k, vocab, dtype=torch.float32)
        d2t = None if vocab == shape.vocab else empty(vocab, dtype=torch.int64)
        rejection_sample_triton(logits, drafts, laws, *sampling, lengths, lengths, lengths, rates, None, d2t)
    positions = empty(batch, query_len, dtype=torch.int64)
    record_logprobs_triton(logits, positions, lengths, lengths, flags, counts, empty(slots, max_len, dtype=torch.float32))
