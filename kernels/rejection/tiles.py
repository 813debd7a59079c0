"""Device functions of rejection sampling: tiles of the target's and the drafter's laws, and what is compared with what."""

import triton
import triton.language as tl

from stepgraph.kernels.row_law_triton import law_tile


@triton.jit
def target_tile(logits_ptr, row, vocab, offsets, inside, largest_ptr, edge_ptr, last_ptr, total_ptr, repair_ptr, temperature):
    """Probabilities `[BLOCK]` of the target's row."""
    return law_tile(
        logits_ptr + row * vocab,
        offsets,
        inside,
        tl.load(largest_ptr + row),
        tl.load(edge_ptr + row),
        tl.load(last_ptr + row),
        tl.load(total_ptr + row),
        tl.load(repair_ptr + row),
        temperature,
    )


@triton.jit
def row_flag(ptr, b, GIVEN: tl.constexpr):
    """The number of row(s) b as int32, 0 where there is no tensor."""
    flag = (b * 0).to(tl.int32)
    if GIVEN:
        flag = tl.load(ptr + b).to(tl.int32)
    return flag


@triton.jit
def draft_tile(draft_law_ptr, t2d_ptr, row, width, offsets, inside, token, hot, HAS_LAW: tl.constexpr, HAS_MAP: tl.constexpr):
    """Probabilities `[BLOCK]` of the drafter's row, at target ids; one-hot at `token` where `hot`."""
    q = tl.where(offsets == token, 1.0, 0.0)
    if HAS_LAW:
        column = offsets
        if HAS_MAP:
            column = tl.load(t2d_ptr + offsets, mask=inside, other=-1)  # [BLOCK]
        soft = inside & (column >= 0) & (column * 0 + hot == 0)
        law = tl.load(draft_law_ptr + row * width + column, mask=soft, other=0.0).to(tl.float32)  # [BLOCK]
        q = tl.where(hot != 0, q, law)
    return q


@triton.jit
def draft_at(ptr, vocab):
    """The draft(s) at `ptr` as int32; −1 for "no draft", as is any id that the target does not have."""
    token = tl.load(ptr)
    return tl.where((token >= 0) & (token < vocab), token, -1).to(tl.int32)


@triton.jit
def draft_odds(
    logits_ptr, draft_tokens_ptr, draft_law_ptr, t2d_ptr, b, i, vocab, width, hot,
    largest_ptr, edge_ptr, last_ptr, total_ptr, repair_ptr, temperature,
    K: tl.constexpr, HAS_LAW: tl.constexpr, HAS_MAP: tl.constexpr,
):  # fmt: skip
    """p and q of draft column i of requests b `[n]`; p = 0 where there is no draft."""
    token = draft_at(draft_tokens_ptr + b * K + i, vocab)
    at = tl.maximum(token, 0)
    row = b * (K + 1) + i
    p = target_tile(
        logits_ptr, row, vocab, at, token >= 0, largest_ptr, edge_ptr, last_ptr, total_ptr, repair_ptr, temperature
    )  # fmt: skip
    q = draft_tile(draft_law_ptr, t2d_ptr, b * K + i, width, at, token >= 0, token, hot, HAS_LAW, HAS_MAP)
    return p, q


@triton.jit
def remainder(weight, q):
    """max(weight − q, 0); 0 where q is NaN, which `tl.maximum` would decide by version."""
    return tl.where(weight > q, weight - q, 0.0)


@triton.jit
def next_scale(scale, p, q):
    """min(scale p / q, 1); a draft with q = 0 stands or falls with p."""
    ratio = tl.where(q > 0, tl.div_rn(p, tl.where(q > 0, q, 1.0)), tl.where(p > 0, float("inf"), 0.0))
    return tl.where(ratio == float("inf"), 1.0, tl.minimum(scale * ratio, 1.0))
