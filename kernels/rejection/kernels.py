"""Triton kernels of rejection sampling; the formulas are those of `stepgraph.kernels.rejection.decide`.

The target's laws are never written out: each is the row's logits and five numbers (`stepgraph.kernels.row_law_triton`).
"""

import triton
import triton.language as tl

from stepgraph.kernels.philox_triton import exponential_at, uniform_at
from stepgraph.kernels.rejection.tiles import draft_at, draft_odds, draft_tile, next_scale, remainder, row_flag, target_tile
from stepgraph.kernels.sampling_triton import best_of

# `Verify` and `Stream`, as the kernels see them.
BLOCK_METHOD, SYNTHETIC_METHOD = tl.constexpr(1), tl.constexpr(2)
ACCEPT_STREAM, TARGET_STREAM = tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["vocab", "width"])
def block_residual_kernel(
    logits_ptr,  # [B, K + 1, V]
    draft_tokens_ptr,  # [B, K]
    draft_law_ptr,  # [B, K, width] or None
    t2d_ptr,  # [V] or None
    temperature_ptr,  # [B], as the next two
    method_ptr,
    one_hot_ptr,
    largest_ptr,  # [B (K + 1)], as the next four
    edge_ptr,
    last_ptr,
    total_ptr,
    repair_ptr,
    left_ptr,  # [B, K]
    vocab,
    width,
    K: tl.constexpr,
    HAS_LAW: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_ONE_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """R_i = Σ_x max(s_i p_{i+1}(x) − q_{i+1}(x), 0) for draft i = program 1 + 1 of rows with block verification."""
    b, i = tl.program_id(0).to(tl.int64), tl.program_id(1) + 1
    temperature = tl.load(temperature_ptr + b)
    left = tl.zeros([BLOCK], tl.float32)
    # Draft i is not the last one only if there is a draft after it.
    token = draft_at(draft_tokens_ptr + b * K + i, vocab)
    if (tl.load(method_ptr + b) == BLOCK_METHOD) & (token >= 0):
        hot = row_flag(one_hot_ptr, b, HAS_ONE_HOT)
        scale = tl.full([1], 1.0, tl.float32)
        for j in range(i):
            p, q = draft_odds(
                logits_ptr, draft_tokens_ptr, draft_law_ptr, t2d_ptr, b + tl.zeros([1], tl.int64), j, vocab, width, hot,
                largest_ptr, edge_ptr, last_ptr, total_ptr, repair_ptr, temperature, K, HAS_LAW, HAS_MAP,
            )  # fmt: skip
            scale = next_scale(scale, p, q)
        for start in range(0, vocab, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = offsets < vocab
            p = target_tile(
                logits_ptr, b * (K + 1) + i, vocab, offsets, inside, largest_ptr, edge_ptr, last_ptr, total_ptr, repair_ptr,
                temperature,
            )  # fmt: skip
            q = draft_tile(draft_law_ptr, t2d_ptr, b * K + i, width, offsets, inside, token, hot, HAS_LAW, HAS_MAP)
            left += remainder(scale * p, q)
    tl.store(left_ptr + b * K + i - 1, tl.sum(left, axis=0))


@triton.jit(do_not_specialize=["batch", "vocab", "width", "rates_stride"])
def accept_kernel(
    logits_ptr,  # [B, K + 1, V]
    draft_tokens_ptr,  # [B, K]
    draft_law_ptr,  # [B, K, width] or None
    t2d_ptr,  # [V] or None
    temperature_ptr,  # [B], as the next five
    seed_ptr,
    base_ptr,
    method_ptr,
    one_hot_ptr,
    rates_ptr,  # [B, rates_stride] or None
    largest_ptr,  # [B (K + 1)], as the next four
    edge_ptr,
    last_ptr,
    total_ptr,
    repair_ptr,
    left_ptr,  # [B, K]
    accepted_ptr,  # [B], as the next three
    scale_ptr,
    residual_ptr,
    repaired_ptr,
    batch,
    vocab,
    width,
    rates_stride,
    K: tl.constexpr,
    HAS_LAW: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_ONE_HOT: tl.constexpr,
    HAS_METHOD: tl.constexpr,
    HAS_RATES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS requests per program, a lane each: drafts that stand, the scale of what is left, whether anything can be left."""
    lane = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    stored = lane < batch
    b = tl.minimum(lane, batch - 1)  # lanes beyond the batch repeat its last request and store nothing
    temperature, seed, base = tl.load(temperature_ptr + b), tl.load(seed_ptr + b), tl.load(base_ptr + b)  # [ROWS]
    hot = row_flag(one_hot_ptr, b, HAS_ONE_HOT)
    method = row_flag(method_ptr, b, HAS_METHOD)
    count = tl.zeros([ROWS], tl.int32)
    standing = tl.full([ROWS], 1, tl.int32)
    for i in tl.static_range(K):
        standing = standing & (draft_at(draft_tokens_ptr + b * K + i, vocab) >= 0).to(tl.int32)
        count += standing

    accepted = tl.zeros([ROWS], tl.int32)
    standing = tl.full([ROWS], 1, tl.int32)
    scale = tl.full([ROWS], 1.0, tl.float32)
    final_scale = tl.full([ROWS], 1.0, tl.float32)
    repaired = (tl.load(repair_ptr + b * (K + 1)) != 0).to(tl.int64)
    for i in tl.static_range(K):
        p, q = draft_odds(
            logits_ptr, draft_tokens_ptr, draft_law_ptr, t2d_ptr, b, i, vocab, width, hot,
            largest_ptr, edge_ptr, last_ptr, total_ptr, repair_ptr, temperature, K, HAS_LAW, HAS_MAP,
        )  # fmt: skip
        drafted = i < count
        repaired += (drafted & (tl.load(repair_ptr + b * (K + 1) + i + 1) != 0)).to(tl.int64)
        u = uniform_at(seed, base + 1 + i, base, ACCEPT_STREAM)
        passes = u * q < p
        if HAS_RATES:
            rate = tl.load(rates_ptr + b * rates_stride + i).to(tl.float32)
            passes = tl.where(method == SYNTHETIC_METHOD, u < rate, passes)
        standing = standing & (drafted & passes).to(tl.int32)
        if HAS_METHOD:
            scale = next_scale(scale, p, q)
            left = tl.load(left_ptr + b * K + i, mask=i + 1 < count, other=0.0)
            below = tl.where(i + 1 == count, u < scale, u * (left + 1.0 - scale) < left)
            in_block = drafted & below & (method == BLOCK_METHOD)
            accepted = tl.where(in_block, i + 1, accepted)
            final_scale = tl.where(in_block, scale, final_scale)
        accepted += tl.where(method == BLOCK_METHOD, 0, standing)
    tl.store(accepted_ptr + b, accepted.to(tl.int64), mask=stored)
    tl.store(scale_ptr + b, final_scale, mask=stored)
    tl.store(residual_ptr + b, ((accepted < count) & (method != SYNTHETIC_METHOD)).to(tl.int32), mask=stored)
    tl.store(repaired_ptr + b, repaired, mask=stored)


@triton.jit(do_not_specialize=["vocab", "width"])
def final_race_kernel(
    logits_ptr,  # [B, K + 1, V]
    draft_tokens_ptr,  # [B, K]
    draft_law_ptr,  # [B, K, width] or None
    t2d_ptr,  # [V] or None
    temperature_ptr,  # [B], as the next three
    seed_ptr,
    base_ptr,
    one_hot_ptr,
    largest_ptr,  # [B (K + 1)], as the next four
    edge_ptr,
    last_ptr,
    total_ptr,
    repair_ptr,
    accepted_ptr,  # [B], as the next two
    scale_ptr,
    residual_ptr,
    best_ptr,  # [B, 2, splits] float64: of what is left, of the target
    winner_ptr,  # [B, 2, splits] int32
    vocab,
    width,
    K: tl.constexpr,
    HAS_LAW: tl.constexpr,
    HAS_MAP: tl.constexpr,
    HAS_ONE_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """Two exponential races with the same numbers, over what is left and over the target's law, on a stretch of tokens."""
    b, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature, seed, base = tl.load(temperature_ptr + b), tl.load(seed_ptr + b), tl.load(base_ptr + b)
    accepted, scale = tl.load(accepted_ptr + b), tl.load(scale_ptr + b)
    from_residual = tl.load(residual_ptr + b) != 0
    best, winner = tl.full([], -1.0, tl.float64), tl.zeros([], tl.int32)
    best_left, winner_left = tl.full([], -1.0, tl.float64), tl.zeros([], tl.int32)
    for tile in range(TILES):
        start = (split * TILES + tile) * BLOCK
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < vocab
        p = target_tile(
            logits_ptr, b * (K + 1) + accepted, vocab, offsets, inside, largest_ptr, edge_ptr, last_ptr, total_ptr,
            repair_ptr, temperature,
        )  # fmt: skip
        noise = exponential_at(seed, base + 1 + accepted, base, TARGET_STREAM, start, BLOCK)
        best, winner = best_of(tl.where(inside, p.to(tl.float64) / noise, -1.0), offsets, best, winner)
        if K > 0:  # noqa: SIM102 (one is decided when compiling)
            if from_residual:
                column = tl.minimum(accepted, K - 1)
                token = draft_at(draft_tokens_ptr + b * K + column, vocab)
                hot = row_flag(one_hot_ptr, b, HAS_ONE_HOT)
                q = draft_tile(draft_law_ptr, t2d_ptr, b * K + column, width, offsets, inside, token, hot, HAS_LAW, HAS_MAP)
                left = remainder(scale * p, q)
                race = tl.where(inside, left.to(tl.float64) / noise, -1.0)
                best_left, winner_left = best_of(race, offsets, best_left, winner_left)
    splits = tl.num_programs(1)
    tl.store(best_ptr + b * 2 * splits + split, best_left)
    tl.store(winner_ptr + b * 2 * splits + split, winner_left)
    tl.store(best_ptr + (b * 2 + 1) * splits + split, best)
    tl.store(winner_ptr + (b * 2 + 1) * splits + split, winner)


@triton.jit
def race_winner(best_ptr, winner_ptr, splits, SPLIT_PAD: tl.constexpr):
    index = tl.arange(0, SPLIT_PAD)
    best = tl.load(best_ptr + index, mask=index < splits, other=-2.0)  # [SPLIT_PAD]
    winner = tl.load(winner_ptr + index, mask=index < splits, other=2147483647)  # [SPLIT_PAD]
    top = tl.max(best, axis=0)
    return top, tl.min(tl.where(best == top, winner, 2147483647), axis=0)


@triton.jit(do_not_specialize=["splits"])
def emit_kernel(
    draft_tokens_ptr,  # [B, K]
    accepted_ptr,  # [B]
    best_ptr,  # [B, 2, splits]
    winner_ptr,  # [B, 2, splits]
    emitted_ptr,  # [B, K + 1]
    splits,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    SPLIT_PAD: tl.constexpr,
):
    """The accepted drafts, the token that won, then −1. Where nothing is left of the target's law, the law itself decides."""
    b = tl.program_id(0).to(tl.int64)
    accepted = tl.load(accepted_ptr + b)
    left, from_left = race_winner(best_ptr + b * 2 * splits, winner_ptr + b * 2 * splits, splits, SPLIT_PAD)
    _, from_law = race_winner(best_ptr + (b * 2 + 1) * splits, winner_ptr + (b * 2 + 1) * splits, splits, SPLIT_PAD)
    final = tl.where(left > 0, from_left, from_law).to(tl.int64)
    column = tl.arange(0, K_PAD)
    drafts = tl.load(draft_tokens_ptr + b * K + column, mask=column < K, other=-1)  # [K_PAD]
    emitted = tl.where(column < accepted, drafts, tl.where(column == accepted, final, -1))
    tl.store(emitted_ptr + b * (K + 1) + column, emitted, mask=column < K + 1)
