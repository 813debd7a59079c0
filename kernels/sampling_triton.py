"""Triton laws and draws; contracts in `stepgraph.kernels.sampling`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.launch import LaunchSpec, check_kernel_dtype, dense, launch
from stepgraph.kernels.philox_triton import exponential_at
from stepgraph.kernels.row_law_triton import law_tile, row_law
from stepgraph.kernels.sampling import check_draw, check_law

BLOCK = 1024
# Tiles of one program of a race. Part of the launch's shape only: an arg-max does not depend on how it is split.
TILES = 4


@triton.jit(do_not_specialize=["vocab"])
def token_law_kernel(
    logits_ptr,  # [N, V]
    law_ptr,  # [N, V] float32
    temperature_ptr,  # [N], as everything below
    largest_ptr,
    edge_ptr,
    last_ptr,
    total_ptr,
    repair_ptr,
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < vocab
    law = law_tile(
        logits_ptr + row * vocab,
        offsets,
        inside,
        tl.load(largest_ptr + row),
        tl.load(edge_ptr + row),
        tl.load(last_ptr + row),
        tl.load(total_ptr + row),
        tl.load(repair_ptr + row),
        tl.load(temperature_ptr + row),
    )
    tl.store(law_ptr + row * vocab + offsets, law, mask=inside)


def token_law_triton(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Same contract as `token_law_reference`; two launches."""
    check_law(logits, temperature, top_k, top_p, min_p)
    logits = dense(logits)
    rows, vocab = logits.shape
    law = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    numbers = row_law(logits, temperature, top_k, top_p, min_p)
    # One program per row and tile of the vocabulary.
    launch(
        LaunchSpec(
            kernel=token_law_kernel,
            grid=(rows, triton.cdiv(vocab, BLOCK)),
            args={
                "logits_ptr": logits,
                "law_ptr": law,
                "temperature_ptr": dense(temperature),
                **numbers.arguments,
                "vocab": vocab,
            },
            constexprs={"BLOCK": BLOCK},
        )
    )
    return law


@triton.jit
def best_of(race, offsets, best, winner):
    """Arg-max so far, joined with a tile's; the lowest id of equals."""
    top = tl.max(race, axis=0)
    first = tl.min(tl.where(race == top, offsets, 2147483647), axis=0)
    return tl.maximum(top, best), tl.where(top > best, first, winner)


@triton.jit(do_not_specialize=["vocab", "stream"])
def race_kernel(
    weights_ptr,  # [N, V]
    seed_ptr,  # [N], as the next two
    position_ptr,
    base_ptr,
    best_ptr,  # [N, splits] float64
    winner_ptr,  # [N, splits] int32
    vocab,
    stream,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    """arg-max over a stretch of the vocabulary of weight / Exp(1)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    seed, position, base = tl.load(seed_ptr + row), tl.load(position_ptr + row), tl.load(base_ptr + row)
    best = tl.full([], -1.0, tl.float64)
    winner = tl.zeros([], tl.int32)
    for tile in range(TILES):
        start = (split * TILES + tile) * BLOCK
        offsets = start + tl.arange(0, BLOCK)
        weights = tl.load(weights_ptr + row * vocab + offsets, mask=offsets < vocab, other=-1.0)  # [BLOCK]
        race = weights.to(tl.float64) / exponential_at(seed, position, base, stream, start, BLOCK)
        best, winner = best_of(race, offsets, best, winner)
    tl.store(best_ptr + row * tl.num_programs(1) + split, best)
    tl.store(winner_ptr + row * tl.num_programs(1) + split, winner)


@triton.jit(do_not_specialize=["splits"])
def race_end_kernel(
    best_ptr,  # [N, splits]
    winner_ptr,  # [N, splits]
    out_ptr,  # [N]
    splits,
    SPLIT_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SPLIT_PAD)
    best = tl.load(best_ptr + row * splits + index, mask=index < splits, other=-2.0)  # [SPLIT_PAD]
    winner = tl.load(winner_ptr + row * splits + index, mask=index < splits, other=2147483647)  # [SPLIT_PAD]
    first = tl.min(tl.where(best == tl.max(best, axis=0), winner, 2147483647), axis=0)
    tl.store(out_ptr + row, first.to(tl.int64))


def draw_triton(weights: Tensor, seed: Tensor, position: Tensor, base: Tensor, stream: int) -> Tensor:
    """Same contract as `draw_reference`; two launches."""
    check_kernel_dtype("draw", weights)
    check_draw(weights, seed, position, base)
    weights = dense(weights)
    rows, vocab = weights.shape
    splits = triton.cdiv(vocab, BLOCK * TILES)
    best = torch.empty((rows, splits), dtype=torch.float64, device=weights.device)
    winner = torch.empty((rows, splits), dtype=torch.int32, device=weights.device)
    out = torch.empty_like(seed, memory_format=torch.contiguous_format)
    # One program per row and stretch of TILES tiles.
    launch(
        LaunchSpec(
            kernel=race_kernel,
            grid=(rows, splits),
            args={
                "weights_ptr": weights,
                "seed_ptr": dense(seed),
                "position_ptr": dense(position),
                "base_ptr": dense(base),
                "best_ptr": best,
                "winner_ptr": winner,
                "vocab": vocab,
                "stream": stream,
            },
            constexprs={"BLOCK": BLOCK, "TILES": TILES},
        )
    )
    # One program per row.
    launch(
        LaunchSpec(
            kernel=race_end_kernel,
            grid=(rows,),
            args={"best_ptr": best, "winner_ptr": winner, "out_ptr": out, "splits": splits},
            constexprs={"SPLIT_PAD": triton.next_power_of_2(splits)},
            num_warps=1,
        )
    )
    return out
