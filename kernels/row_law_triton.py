"""The law of a row of logits without a sort: which tokens stay, and the sum of their weights.

With s(x) = (l(x) − max) / temperature ≤ 0 and weights w = exp(s), whatever min-p, top-k and top-p keep is a prefix of the
ranking (s descending, id ascending). So a law is four numbers: the maximum, a threshold on s, the last id that stays among
the tokens at the threshold, and the sum of the weights that stay. The bits of −s, read as an integer, rise as s falls; a
search over them, `BITS` at a time, finds the k-th largest (by counting) and the edge of the top-p set (by summing weights).
Tokens at one threshold have one weight, so a part of them has a mass that needs no sum.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.launch import LaunchSpec, check_kernel_dtype, dense, launch

BLOCK = 1024
# Thresholds tried in one pass over the row: 2^BITS - 1 at a time.
BITS = 4


# How a row was repaired: nothing finite counts as uniform, +inf takes all the mass, NaN alone counts as −inf.
SOUND, HAD_NAN, FLAT, INFINITE = (tl.constexpr(code) for code in range(4))


@triton.jit
def scaled_tile(logits_ptr, offsets, inside, largest, repair, temperature):
    """s of a tile `[BLOCK]` of the row at `logits_ptr`; −inf outside. The temperature of a greedy row is taken as 1."""
    x = tl.load(logits_ptr + offsets, mask=inside, other=float("-inf")).to(tl.float32)  # [BLOCK]
    x = tl.where(x != x, float("-inf"), x)
    x = tl.where(repair == INFINITE, tl.where(x == float("inf"), 0.0, float("-inf")), x)
    x = tl.where(repair == FLAT, 0.0, x)
    s = tl.div_rn(x - largest, tl.zeros_like(x) + tl.where(temperature > 0, temperature, 1.0))
    return tl.where(inside, s, float("-inf"))


@triton.jit
def rank_key(s):
    """Order of a token: 0 for the most likely, rising as s falls; −0 and 0 are one."""
    return tl.where(s == 0, 0.0, -s).to(tl.int32, bitcast=True)


@triton.jit
def law_tile(logits_ptr, offsets, inside, largest, edge, last, total, repair, temperature):
    """Probabilities of a tile `[BLOCK]`, from the row's numbers."""
    s = scaled_tile(logits_ptr, offsets, inside, largest, repair, temperature)
    key = rank_key(s)
    kept = inside & ((key < edge) | ((key == edge) & (offsets <= last)))
    return tl.where(kept, tl.div_rn(tl.exp(s), tl.zeros_like(s) + total), 0.0)


@triton.jit
def search(
    logits_ptr, vocab, largest, repair, temperature, goal, tied_key, tied_mass,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """The largest key such that the tokens before it do not reach `goal`, by count or by mass, and what they reach.

    Masses stop growing at `tied_key`, whose tokens have `tied_mass` together.
    """
    prefix = tl.zeros([], tl.int64)
    reached = tl.zeros([], tl.float32)
    ways = tl.arange(0, 2**BITS)
    for digit in range(32 // BITS):
        unit = tl.full([], 1, tl.int64) << (32 - BITS * (digit + 1))
        bounds = prefix + ways * unit  # [2^BITS]
        before = tl.zeros([2**BITS], tl.float32)
        for start in range(0, vocab, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            inside = offsets < vocab
            s = scaled_tile(logits_ptr, offsets, inside, largest, repair, temperature)
            key = rank_key(s).to(tl.int64)
            if COUNT:
                weight = tl.where(inside, 1.0, 0.0)
            else:
                weight = tl.where(key < tied_key, tl.exp(s), 0.0)
            before += tl.sum(tl.where(key[None, :] < bounds[:, None], weight[None, :], 0.0), axis=1)
        if not COUNT:
            before += tl.where(bounds > tied_key, tied_mass, 0.0)
        # Sums in one order rise with the bound, so the bounds that miss the goal are the first ones.
        chosen = tl.maximum(tl.sum((before < goal).to(tl.int32), axis=0) - 1, 0)
        reached = tl.sum(tl.where(ways == chosen, before, 0.0), axis=0)
        prefix += chosen * unit
    return prefix, reached


@triton.jit
def weigh(logits_ptr, vocab, largest, repair, temperature, edge, BLOCK: tl.constexpr):
    """Sum of the weights before the key `edge`, and how many tokens are at it."""
    mass = tl.zeros([BLOCK], tl.float32)
    ties = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < vocab
        s = scaled_tile(logits_ptr, offsets, inside, largest, repair, temperature)
        key = rank_key(s).to(tl.int64)
        mass += tl.where(inside & (key < edge), tl.exp(s), 0.0)
        ties += (inside & (key == edge)).to(tl.int32)
    return tl.sum(mass, axis=0), tl.sum(ties, axis=0)


@triton.jit
def weight_of(edge):
    """The weight of a token at a key."""
    return tl.exp(-(edge.to(tl.int32).to(tl.float32, bitcast=True)))


@triton.jit(do_not_specialize=["vocab", "query_len"])
def row_law_kernel(
    logits_ptr,  # [N, V]
    temperature_ptr,  # [N // query_len], as the next three
    top_k_ptr,
    top_p_ptr,
    log_min_p_ptr,
    largest_ptr,  # [N], as everything below
    edge_ptr,
    last_ptr,
    total_ptr,
    repair_ptr,
    vocab,
    query_len,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    """One program per row: maximum, then the edge of what stays, then its sum. A greedy row ends after the maximum."""
    row = tl.program_id(0).to(tl.int64)
    owner = row // query_len
    logits_ptr += row * vocab
    temperature = tl.load(temperature_ptr + owner).to(tl.float32)

    largest = tl.full([], float("-inf"), tl.float32)
    best = tl.zeros([], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < vocab
        x = tl.load(logits_ptr + offsets, mask=inside, other=float("-inf")).to(tl.float32)  # [BLOCK]
        nans += (x != x).to(tl.int32)
        x = tl.where(x != x, float("-inf"), x)
        top = tl.max(x, axis=0)
        first = tl.min(tl.where(x == top, offsets, vocab), axis=0)
        best = tl.where(top > largest, first, best)
        largest = tl.maximum(top, largest)
    repair = tl.where(tl.sum(nans, axis=0) > 0, HAD_NAN, SOUND)
    repair = tl.where(largest == float("-inf"), FLAT, tl.where(largest == float("inf"), INFINITE, repair))
    largest = tl.where(repair >= FLAT, 0.0, largest)
    tl.store(largest_ptr + row, largest)
    tl.store(repair_ptr + row, repair)

    if temperature <= 0:
        tl.store(edge_ptr + row, 0)
        tl.store(last_ptr + row, best)
        tl.store(total_ptr + row, 1.0)
    else:
        # min-p keeps whole ties; top-k may cut one.
        edge = rank_key(tl.load(log_min_p_ptr + owner).to(tl.float32)).to(tl.int64)
        quota = tl.zeros([], tl.int32) + vocab
        top_k = tl.load(top_k_ptr + owner)
        if (top_k > 0) & (top_k < vocab):
            nothing = tl.zeros([], tl.float32)
            goal = top_k.to(tl.float32)
            key, before = search(
                logits_ptr, vocab, largest, repair, temperature, goal, edge, nothing, True, BLOCK, BITS
            )  # fmt: skip
            quota = tl.where(key <= edge, (goal - before).to(tl.int32), quota)
            edge = tl.minimum(key, edge)
        mass, ties = weigh(logits_ptr, vocab, largest, repair, temperature, edge, BLOCK)
        tied_mass = tl.minimum(quota, ties).to(tl.float32) * weight_of(edge)
        total = mass + tied_mass
        top_p = tl.load(top_p_ptr + owner).to(tl.float32)
        if top_p < 1:
            goal = top_p * total
            key, before = search(
                logits_ptr, vocab, largest, repair, temperature, goal, edge, tied_mass, False, BLOCK, BITS
            )  # fmt: skip
            if key <= edge:
                needed = tl.maximum(tl.ceil((goal - before) / weight_of(key)), 1.0)
                # No more than a tie has: the quotient overflows an int32 where the weights at the edge vanish.
                needed = tl.minimum(needed, vocab * 1.0).to(tl.int32)
                quota = tl.where(key == edge, tl.minimum(quota, needed), needed)
                edge = key
                mass, ties = weigh(logits_ptr, vocab, largest, repair, temperature, edge, BLOCK)
                total = mass + tl.minimum(quota, ties).to(tl.float32) * weight_of(edge)
        last = tl.zeros([], tl.int32) + vocab
        if quota < ties:
            seen = tl.zeros([], tl.int32)
            for start in range(0, vocab, BLOCK):
                offsets = start + tl.arange(0, BLOCK)
                inside = offsets < vocab
                s = scaled_tile(logits_ptr, offsets, inside, largest, repair, temperature)
                tied = (inside & (rank_key(s).to(tl.int64) == edge)).to(tl.int32)
                count = seen + tl.cumsum(tied, axis=0)
                last = tl.minimum(last, tl.min(tl.where((tied > 0) & (count == quota), offsets, vocab), axis=0))
                seen += tl.sum(tied, axis=0)
        tl.store(edge_ptr + row, edge.to(tl.int32))
        tl.store(last_ptr + row, last)
        tl.store(total_ptr + row, total)


class RowLaw(NamedTuple):
    """The numbers behind the laws of N rows, `[N]` each: float32, int32, int32, float32, int32."""

    largest: Tensor
    edge: Tensor
    last: Tensor
    total: Tensor
    repair: Tensor

    @property
    def arguments(self) -> dict[str, Tensor]:
        return {f"{name}_ptr": tensor for name, tensor in self._asdict().items()}


def row_law(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, query_len: int = 1) -> RowLaw:
    """The law of each row of contiguous `logits [N, V]`; parameters `[N // query_len]` as for `token_law`."""
    check_kernel_dtype("token_law", logits)
    rows, vocab = logits.shape
    numbers = RowLaw(
        *(
            torch.empty(rows, dtype=dtype, device=logits.device)
            for dtype in (torch.float32, torch.int32, torch.int32, torch.float32, torch.int32)
        )
    )
    # One program per row.
    launch(
        LaunchSpec(
            kernel=row_law_kernel,
            grid=(rows,),
            args={
                "logits_ptr": logits,
                "temperature_ptr": dense(temperature),
                "top_k_ptr": dense(top_k),
                "top_p_ptr": dense(top_p),
                "log_min_p_ptr": min_p.log(),
                **numbers.arguments,
                "vocab": vocab,
                "query_len": query_len,
            },
            constexprs={"BLOCK": BLOCK, "BITS": BITS},
            num_warps=8,
        )
    )
    return numbers
