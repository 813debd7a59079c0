"""Triton log-probabilities of emitted tokens; contract in `stepgraph.kernels.logprobs`."""

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.launch import LaunchSpec, check_kernel_dtype, dense, launch
from stepgraph.kernels.logprobs import check_record_logprobs
from stepgraph.kernels.row_law_triton import FLAT, INFINITE, SOUND, scaled_tile

BLOCK = 2048


@triton.jit(do_not_specialize=["vocab", "stride"])
def record_logprobs_kernel(
    logits_ptr,  # [B, Q, V]
    emitted_ptr,  # [B, Q]
    slots_ptr,  # [B]
    base_ptr,  # [B]
    wanted_ptr,  # [S]
    seq_len_ptr,  # [S]
    logprobs_ptr,  # [S, stride]
    vocab,
    stride,
    QUERY_LEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per row: log softmax(row)[token], if the token was committed and its request wants to know."""
    row = tl.program_id(0).to(tl.int64)
    b = row // QUERY_LEN
    slot = tl.load(slots_ptr + b)
    position = tl.load(base_ptr + b) + 1 + row % QUERY_LEN
    if (tl.load(wanted_ptr + slot).to(tl.int32) != 0) & (position <= tl.load(seq_len_ptr + slot)):
        logits_ptr += row * vocab
        tops = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + offsets, mask=offsets < vocab, other=float("-inf")).to(tl.float32)  # [BLOCK]
            tops = tl.maximum(tops, tl.where(x != x, float("-inf"), x))
        largest = tl.max(tops, axis=0)
        repair = tl.where(largest == float("-inf"), FLAT, tl.where(largest == float("inf"), INFINITE, SOUND))
        largest = tl.where(repair >= FLAT, 0.0, largest)
        masses = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            masses += tl.exp(scaled_tile(logits_ptr, offsets, offsets < vocab, largest, repair, 1.0))
        token = tl.load(emitted_ptr + row) + tl.arange(0, 1)
        own = scaled_tile(logits_ptr, token, token < vocab, largest, repair, 1.0)
        tl.store(logprobs_ptr + slot * stride + position, tl.sum(own, axis=0) - tl.log(tl.sum(masses, axis=0)))


def record_logprobs_triton(
    logits: Tensor, emitted: Tensor, slots: Tensor, base: Tensor, wanted: Tensor, seq_len: Tensor, logprobs: Tensor
) -> None:
    """Same contract as `record_logprobs_reference`; one launch."""
    check_kernel_dtype("record_logprobs", logits)
    check_record_logprobs(logits, emitted, slots, base, wanted, seq_len, logprobs)
    if not logprobs.is_contiguous():
        raise ValueError(f"record_logprobs: logprobs must be contiguous; strides are {logprobs.stride()}")
    batch, query_len, vocab = logits.shape
    # One program per row of logits.
    launch(
        LaunchSpec(
            kernel=record_logprobs_kernel,
            grid=(batch * query_len,),
            args={
                "logits_ptr": dense(logits),
                "emitted_ptr": dense(emitted),
                "slots_ptr": dense(slots),
                "base_ptr": dense(base),
                "wanted_ptr": dense(wanted),
                "seq_len_ptr": dense(seq_len),
                "logprobs_ptr": logprobs,
                "vocab": vocab,
                "stride": logprobs.shape[1],
            },
            constexprs={"QUERY_LEN": query_len, "BLOCK": BLOCK},
        )
    )
