"""Triton logit transforms; contract and formula in `stepgraph.kernels.transforms`."""

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.launch import LaunchSpec, check_kernel_dtype, launch
from stepgraph.kernels.transforms import check_transform_logits

BLOCK = 2048  # tokens of the vocabulary in one program, whose occurrences it counts
HISTORY = 512  # positions of the text read at a time


@triton.jit(do_not_specialize=["vocab", "history_stride", "num_bias", "num_stops"])
def transform_logits_kernel(
    logits_ptr,  # [B, K + 1, V]
    draft_tokens_ptr,  # [B, K]
    slots_ptr,  # [B]
    base_ptr,  # [B]
    history_ptr,  # [S, history_stride]
    transformed_ptr,  # [S], as the next six
    prompt_len_ptr,
    min_len_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    bias_ids_ptr,  # [S, num_bias]
    bias_values_ptr,  # [S, num_bias]
    stop_ids_ptr,  # [S, num_stops]
    vocab,
    history_stride,
    num_bias,
    num_stops,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    HISTORY: tl.constexpr,
):
    """A tile of all K + 1 rows of one request; at once over where the request asks for nothing."""
    b = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + b)
    if tl.load(transformed_ptr + slot).to(tl.int32) != 0:
        first = tl.program_id(1) * BLOCK
        ids = first + tl.arange(0, BLOCK)
        inside = ids < vocab
        base, prompt_len = tl.load(base_ptr + b).to(tl.int32), tl.load(prompt_len_ptr + slot).to(tl.int32)
        seen = tl.zeros([BLOCK], tl.int32)
        said = tl.zeros([BLOCK], tl.int32)
        for start in range(0, base + 1, HISTORY):
            position = start + tl.arange(0, HISTORY)
            text = tl.load(history_ptr + slot * history_stride + position, mask=position <= base, other=-1)  # [HISTORY]
            bucket = text.to(tl.int32) - first
            counted = (position <= base) & (bucket >= 0) & (bucket < BLOCK)
            bucket = tl.where(counted, bucket, 0)
            seen += tl.histogram(bucket, BLOCK, mask=counted)
            said += tl.histogram(bucket, BLOCK, mask=counted & (position >= prompt_len))

        bias = tl.zeros([BLOCK], tl.float32)
        for index in range(num_bias):
            token = tl.load(bias_ids_ptr + slot * num_bias + index)
            bias += tl.where(ids == token, tl.load(bias_values_ptr + slot * num_bias + index), 0.0)
        stops = tl.zeros([BLOCK], tl.int32)
        for index in range(num_stops):
            stops = stops | (ids == tl.load(stop_ids_ptr + slot * num_stops + index)).to(tl.int32)

        min_len = tl.load(min_len_ptr + slot)
        repetition = tl.load(repetition_ptr + slot)
        frequency, presence = tl.load(frequency_ptr + slot), tl.load(presence_ptr + slot)
        drafted = tl.full([], 1, tl.int32)
        for i in tl.static_range(K + 1):
            pointers = logits_ptr + (b * (K + 1) + i) * vocab + ids
            x = tl.load(pointers, mask=inside, other=0.0).to(tl.float32) + bias  # [BLOCK]
            divided = tl.div_rn(x, tl.zeros_like(x) + repetition)
            x = tl.where(seen > 0, tl.where(x > 0, divided, x * repetition), x)
            x = x - frequency * said.to(tl.float32) - tl.where(said > 0, presence, 0.0)
            x = tl.where((stops > 0) & (base + 1 + i < min_len), float("-inf"), x)
            tl.store(pointers, x.to(logits_ptr.dtype.element_ty), mask=inside)
            if i < K:
                token = tl.load(draft_tokens_ptr + b * K + i)
                drafted = drafted & ((token >= 0) & (token < vocab)).to(tl.int32)
                one = tl.where((ids == token) & (drafted > 0), 1, 0)
                seen += one
                said += one


def transform_logits_triton(
    logits: Tensor,
    draft_tokens: Tensor,
    slots: Tensor,
    base: Tensor,
    history: Tensor,
    transformed: Tensor,
    prompt_len: Tensor,
    min_len: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    stop_ids: Tensor,
) -> None:
    """Same contract as `transform_logits_reference`; one launch."""
    check_kernel_dtype("transform_logits", logits)
    check_transform_logits(
        logits, draft_tokens, slots, base, history, transformed, prompt_len, min_len, repetition,
        frequency, presence, bias_ids, bias_values, stop_ids,
    )  # fmt: skip
    if not logits.is_contiguous() or not history.is_contiguous():
        raise ValueError("transform_logits: logits and history must be contiguous")
    batch, query_len, vocab = logits.shape
    by_slot = {
        "transformed": transformed,
        "prompt_len": prompt_len,
        "min_len": min_len,
        "repetition": repetition,
        "frequency": frequency,
        "presence": presence,
        "bias_ids": bias_ids,
        "bias_values": bias_values,
        "stop_ids": stop_ids,
    }
    # One program per request and tile of the vocabulary.
    launch(
        LaunchSpec(
            kernel=transform_logits_kernel,
            grid=(batch, triton.cdiv(vocab, BLOCK)),
            args={
                "logits_ptr": logits,
                "draft_tokens_ptr": draft_tokens.contiguous(),
                "slots_ptr": slots.contiguous(),
                "base_ptr": base.contiguous(),
                "history_ptr": history,
                **{f"{name}_ptr": tensor.contiguous() for name, tensor in by_slot.items()},
                "vocab": vocab,
                "history_stride": history.shape[1],
                "num_bias": bias_ids.shape[1],
                "num_stops": stop_ids.shape[1],
            },
            constexprs={"K": query_len - 1, "BLOCK": BLOCK, "HISTORY": HISTORY},
            num_warps=8 if query_len == 1 else 16,  # what compiles without spills; no sum of floats depends on it
            # A histogram adds integers in shared memory: any order gives the same bits.
            deterministic=False,
        )
    )
