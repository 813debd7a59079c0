"""Prompt look-up (Saxena 2023): propose what followed the latest earlier occurrence of the longest matching suffix.

A match that overlaps the suffix itself means the text repeats with period p = (end − match); the proposal then continues the
period instead of stopping at the end of the history.
"""

import torch
from torch import Tensor

from stepgraph.kernels.checks import check_tensor, check_tensors
from stepgraph.kernels.registry import register


def check_ngram_propose(history: Tensor, slots: Tensor, last_position: Tensor, k: int, min_match: int, max_match: int) -> None:
    """Raise a ValueError where `ngram_propose` has no meaning."""
    op = "ngram_propose"
    check_tensor(op, "history", history, (None, None), torch.int64)
    if history.shape[1] == 0:
        raise ValueError(f"{op}: history is {list(history.shape)}; allowed is [S, max_len] with max_len ≥ 1")
    check_tensor(op, "slots", slots, (None,), torch.int64)
    check_tensors(op, tuple(slots.shape), torch.int64, last_position=last_position)
    if k < 0:
        raise ValueError(f"{op}: k is {k}; allowed is 0 or more")
    if not 1 <= min_match <= max_match:
        raise ValueError(f"{op}: min_match and max_match are {min_match} and {max_match}; allowed is 1 ≤ min_match ≤ max_match")


def ngram_propose_reference(
    history: Tensor, slots: Tensor, last_position: Tensor, k: int, min_match: int, max_match: int
) -> Tensor:
    """Proposed tokens for each row.

    Args:
        history: `[S, max_len]` int64, tokens of each request by position.
        slots: `[B]` int64, the request of each row.
        last_position: `[B]` int64, position of the last committed token; nothing beyond it is read.
        k: tokens to propose.
        min_match, max_match: shortest and longest suffix looked for.

    Returns:
        `[B, k]` int64; all −1 in rows without a match.
    """
    tokens = history[slots]
    length = tokens.shape[1]
    end = torch.arange(length, device=tokens.device)[None]
    last = last_position[:, None]

    matched = torch.zeros_like(tokens)  # how many tokens before and including `end` equal the suffix
    agreeing = end < last
    for back in range(max_match):
        suffix_token = tokens.gather(1, (last - back).clamp(min=0))
        earlier = tokens.roll(back, dims=1)
        agreeing = agreeing & (end >= back) & (last >= back) & (earlier == suffix_token)
        matched = matched + agreeing
    # Longest match first, latest among equals.
    score = torch.where(matched >= min_match, matched * length + end, -1)
    best, match = score.max(dim=1, keepdim=True)
    period = (last - match).clamp(min=1)
    source = match + 1 + torch.arange(k, device=tokens.device)[None] % period
    return torch.where(best >= 0, tokens.gather(1, source.clamp(0, length - 1)), -1)


ngram_propose = register(
    "ngram_propose(Tensor history, Tensor slots, Tensor last_position, int k, int min_match, int max_match) -> Tensor",
    reference=ngram_propose_reference,
    triton="stepgraph.kernels.ngram_triton:ngram_propose_triton",
    fake=lambda history, slots, last_position, k, min_match, max_match: slots.new_empty((slots.shape[0], k)),
    check=check_ngram_propose,
)
