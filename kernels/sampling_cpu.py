"""Laws and draws on the CPU: the reference's decisions, for the tokens that can matter.

A filter needs the ranking of few tokens, and a race only those that can win. What is left out is left out for certain: where
a shortcut cannot tell, the whole row is ranked.
"""

import numpy as np
import torch
from torch import Tensor

from stepgraph.kernels.dtypes import accumulation_dtype
from stepgraph.kernels.philox import Stream, exponential_at
from stepgraph.kernels.sampling import check_draw, check_law, draw_reference, finite_logits, token_law_reference

# Rows up to this length are handled together, as by the reference: an operator's call costs more than its work there.
SHORT = 2048


def greedy_tokens_cpu(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`[..., V]` -> tokens as of `greedy_tokens` and rows as of `needs_repair`, in one pass where no row needs repair."""
    largest, tokens = logits.max(-1)  # of equal maxima the first; NaN wins
    broken = ~largest.isfinite()
    if broken.any():
        tokens[broken] = finite_logits(logits[broken]).max(-1).indices
    return tokens, broken


def token_law_cpu(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Same contract as `token_law_reference`; greedy rows take the arg-max alone, and only filtered ones are ranked."""
    check_law(logits, temperature, top_k, top_p, min_p)
    law = torch.zeros(logits.shape, dtype=accumulation_dtype(logits.dtype))
    sampled = temperature > 0
    filtered = sampled & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    if len(greedy := (~sampled).nonzero().flatten()):
        law[greedy, greedy_tokens_cpu(logits[greedy])[0]] = 1.0
    if logits.shape[1] <= SHORT:
        if len(rows := filtered.nonzero().flatten()):
            law[rows] = token_law_reference(logits[rows], *(tensor[rows] for tensor in (temperature, top_k, top_p, min_p)))
        sampled = sampled & ~filtered
    for rows in sampled.nonzero().flatten().split(1 if logits.shape[1] > SHORT else len(logits)):
        wide = logits[rows].to(law.dtype)
        largest = wide.amax(-1, keepdim=True)
        if not largest.isfinite().all():
            wide = finite_logits(wide)
            largest = wide.amax(-1, keepdim=True)
        scaled = (wide - largest) / temperature[rows, None].to(law.dtype)
        law[rows] = scaled.softmax(-1)
        if filtered[rows].any():
            row = rows[0]
            kept = _kept(scaled[0], law[row], top_k[row], top_p[row].to(law.dtype), min_p[row].to(law.dtype))
            law[row] = torch.full_like(law[row], -torch.inf).scatter(0, kept, scaled[0, kept]).softmax(-1)
    return law


def _kept(scaled: Tensor, law: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Ids that min-p, top-k and top-p keep of one row, from `scaled, law [V]` and numbers; the specification's decisions."""

    def ranked(ids: Tensor) -> Tensor:  # ids rise
        return ids[scaled[ids].argsort(descending=True, stable=True)]

    limit = int(top_k) if 0 < top_k < len(scaled) else 0
    if limit or min_p > 0:
        bound = torch.maximum(min_p.log(), scaled.topk(limit).values[-1]) if limit else min_p.log()
        order = ranked(_ids(scaled >= bound))
        order = order[:limit] if limit else order
        total = law[order.sort().values].cumsum(0)[-1]
    else:
        total = law.cumsum(0)[-1]
        # Tokens too unlikely for this have together less than half of what top-p leaves out.
        order = ranked(_ids(scaled >= ((1 - top_p) * total / (2 * len(scaled) * law.amax())).log()))
        if law[order].sum() <= (top_p + 1e-6) * total:  # by less than rounding: a token after these could stay
            order = ranked(torch.arange(len(scaled)))
    if top_p >= 1:
        return order
    mass = law[order]
    stays = mass.cumsum(0) - mass < top_p * total
    stays[0] = True
    return order[stays]


def _ids(mask: Tensor) -> Tensor:
    """Where the mask `[V]` is set; NumPy takes a third of the time that `nonzero` does."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))


def draw_cpu(weights: Tensor, seed: Tensor, position: Tensor, base: Tensor, stream: int) -> Tensor:
    """Same contract as `draw_reference`; a token of weight 0 cannot win, and the only token of a row needs no noise."""
    check_draw(weights, seed, position, base)
    tokens, support = weights.argmax(-1), weights > 0
    several = (support.sum(-1) > 1).nonzero().flatten()
    if weights.shape[1] <= SHORT:
        if len(several):
            tokens[several] = draw_reference(*(t[several] for t in (weights, seed, position, base)), stream)
        return tokens
    for row in several:
        entries = _ids(support[row])
        counter = (t[row, None] for t in (seed, position, base))
        if 4 * len(entries) < weights.shape[1]:
            race = weights[row, entries].to(torch.float64) / exponential_at(*counter, Stream(stream), entries)[0]
            tokens[row] = entries[race.argmax()]
        else:
            tokens[row] = draw_reference(weights[row, None], *counter, stream)[0]
    return tokens
