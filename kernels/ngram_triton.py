"""Triton prompt look-up, one program per row; contract in `stepgraph.kernels.ngram`."""

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.launch import LaunchSpec, launch
from stepgraph.kernels.ngram import check_ngram_propose

BLOCK = 1024


@triton.jit(do_not_specialize=["history_stride", "k"])
def ngram_propose_kernel(
    history_ptr,  # [S, max_len]
    slots_ptr,  # [B]
    last_position_ptr,  # [B]
    out_ptr,  # [B, k]
    history_stride,
    k,
    MIN_MATCH: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    K_PAD: tl.constexpr,
):
    """Score each earlier position by (tokens that agree with the suffix, position); copy what followed the best one."""
    row = tl.program_id(0).to(tl.int64)
    tokens_ptr = history_ptr + tl.load(slots_ptr + row).to(tl.int64) * history_stride
    last = tl.load(last_position_ptr + row).to(tl.int32)
    best = tl.full([], -1, tl.int64)
    for start in range(0, last, BLOCK):
        end = start + tl.arange(0, BLOCK)
        agreeing = end < last
        matched = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(MAX_MATCH):
            suffix_token = tl.load(tokens_ptr + tl.maximum(last - back, 0))
            reachable = agreeing & (end >= back) & (tl.zeros([BLOCK], tl.int32) + last >= back)
            earlier = tl.load(tokens_ptr + end - back, mask=reachable, other=-1)  # [BLOCK]
            agreeing = reachable & (earlier == suffix_token)
            matched += agreeing.to(tl.int64)
        score = tl.where(matched >= MIN_MATCH, matched * history_stride + end, -1)
        best = tl.maximum(best, tl.max(score, axis=0))
    match = tl.maximum(best, 0) % history_stride
    period = tl.maximum(last - match, 1)
    column = tl.arange(0, K_PAD)
    source = tl.minimum(match + 1 + column % period, history_stride - 1)
    proposed = tl.load(tokens_ptr + source, mask=column < k, other=-1)  # [K_PAD]
    tl.store(out_ptr + row * k + column, tl.where(best >= 0, proposed, -1), mask=column < k)


def ngram_propose_triton(
    history: Tensor, slots: Tensor, last_position: Tensor, k: int, min_match: int, max_match: int
) -> Tensor:
    """Same contract as `ngram_propose_reference`."""
    check_ngram_propose(history, slots, last_position, k, min_match, max_match)
    if not history.is_contiguous():
        raise ValueError(f"ngram_propose: the history must be contiguous; strides are {history.stride()}")
    batch = slots.shape[0]
    out = history.new_empty((batch, k))
    if k == 0:
        return out
    # One program per row.
    launch(
        LaunchSpec(
            kernel=ngram_propose_kernel,
            grid=(batch,),
            args={
                "history_ptr": history,
                "slots_ptr": slots.contiguous(),
                "last_position_ptr": last_position.contiguous(),
                "out_ptr": out,
                "history_stride": history.shape[1],
                "k": k,
            },
            constexprs={
                "MIN_MATCH": min_match,
                "MAX_MATCH": max_match,
                "BLOCK": BLOCK,
                "K_PAD": triton.next_power_of_2(k),
            },
            num_warps=8,  # with 4, k = 1 and matches up to 4 spill on sm_90
        )
    )
    return out
