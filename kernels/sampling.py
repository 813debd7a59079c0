"""From logits to a law, and from a law to a token.

The law of a row is softmax(logits / temperature), restricted in this order: min-p, top-k, top-p. Temperature 0 is the one-hot
law of the arg-max, ties to the lowest id. A draw is an exponential race, arg-min E_i / p_i with E_i ~ Exp(1), which is the
Gumbel-max trick without its logarithms: no sum over the vocabulary is needed, and a token of probability 0 can never win.
"""

import torch
from torch import Tensor

from stepgraph.kernels.norm import accumulation_dtype
from stepgraph.kernels.philox import Stream, exponential
from stepgraph.kernels.registry import register


def finite_logits(logits: Tensor) -> Tensor:
    """Logits that always define a law: NaN counts as −inf, +inf takes all the mass, a row with nothing left is uniform."""
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    infinite = logits == torch.inf
    logits = torch.where(infinite.any(-1, keepdim=True), torch.where(infinite, 0.0, -torch.inf), logits)
    return torch.where((logits == -torch.inf).all(-1, keepdim=True), 0.0, logits)


def needs_repair(logits: Tensor) -> Tensor:
    """`[..., V]` -> `[...]` bool: rows that `finite_logits` changes: NaN, +inf, or nothing but −inf."""
    return ~logits.amax(-1).isfinite()  # amax hands NaN on


def greedy_tokens(logits: Tensor) -> Tensor:
    """`[..., V]` -> `[...]` int64 arg-max, ties to the lowest id; NaN never wins."""
    logits = finite_logits(logits)
    best = logits == logits.amax(-1, keepdim=True)
    return best.to(torch.uint8).argmax(-1)  # of equal maxima, the first


def token_law_reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The law each row is sampled from.

    Args:
        logits: `[N, V]`, any float dtype.
        temperature: `[N]`, ≥ 0; 0 is greedy.
        top_k: `[N]` int64; 0 keeps all. Of equal logits at the edge the lowest ids stay, so that exactly k remain.
        top_p: `[N]` in (0, 1]; keeps the smallest set of most likely tokens (ties: lowest id first) with at least that mass.
        min_p: `[N]` in [0, 1]; keeps tokens with at least that fraction of the largest probability.

    Returns:
        `[N, V]` probabilities in float32 (float64 for float64 logits).
    """
    dtype = accumulation_dtype(logits.dtype)
    greedy = (temperature <= 0)[:, None]
    one_hot = torch.nn.functional.one_hot(greedy_tokens(logits), logits.shape[-1]).to(dtype)
    logits = finite_logits(logits.to(dtype))
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(greedy, 1.0, temperature[:, None]).to(dtype)
    law = scaled.softmax(-1)

    # p(x) ≥ min_p p(max), without rounding either side by the sum.
    kept = scaled >= min_p[:, None].to(dtype).log()
    order = torch.argsort(scaled, dim=-1, descending=True, stable=True)
    ranked_kept = kept.gather(-1, order)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ranked_kept = ranked_kept & ((top_k[:, None] <= 0) | (rank < top_k[:, None]))
    ranked_law = torch.where(ranked_kept, law.gather(-1, order), 0.0)
    ranked_law = ranked_law / ranked_law.sum(-1, keepdim=True)
    mass_before = ranked_law.cumsum(-1) - ranked_law
    ranked_kept = ranked_kept & ((rank == 0) | (mass_before < top_p[:, None].to(dtype)) | (top_p[:, None] >= 1))
    kept = torch.zeros_like(kept).scatter(-1, order, ranked_kept)

    law = torch.where(kept, scaled, -torch.inf).softmax(-1)
    return torch.where(greedy, one_hot, law)


def token_law_cpu(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Same contract; sorts only the rows that ask for it, and takes the arg-max alone for greedy rows."""
    law = torch.zeros(logits.shape, dtype=accumulation_dtype(logits.dtype))
    sampled = temperature > 0
    filtered = sampled & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    greedy, plain, filtered = (rows.nonzero().flatten() for rows in (~sampled, sampled & ~filtered, filtered))
    if len(greedy):
        law[greedy, greedy_tokens(logits[greedy])] = 1.0
    if len(plain):
        wide = finite_logits(logits[plain].to(law.dtype))
        law[plain] = ((wide - wide.amax(-1, keepdim=True)) / temperature[plain, None].to(law.dtype)).softmax(-1)
    if len(filtered):
        params = (tensor[filtered] for tensor in (temperature, top_k, top_p, min_p))
        law[filtered] = token_law_reference(logits[filtered], *params)
    return law


def draw_reference(weights: Tensor, seed: Tensor, position: Tensor, base: Tensor, stream: int) -> Tensor:
    """`weights [N, V]` (non-negative, need not sum to 1), int64 `[N]` counters -> `[N]` int64 tokens drawn ∝ weights."""
    race = weights.to(torch.float64) / exponential(seed, position, base, Stream(stream), weights.shape[-1])
    return race.argmax(-1)


def draw_cpu(weights: Tensor, seed: Tensor, position: Tensor, base: Tensor, stream: int) -> Tensor:
    """Same contract; rows with a single possible token (greedy ones) need no noise."""
    tokens = weights.argmax(-1)
    rows = ((weights > 0).sum(-1) > 1).nonzero().flatten()
    if len(rows):
        tokens[rows] = draw_reference(weights[rows], seed[rows], position[rows], base[rows], stream)
    return tokens


token_law = register(
    "token_law(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p) -> Tensor",
    reference=token_law_reference,
    cpu=token_law_cpu,
    triton="stepgraph.kernels.sampling_triton:token_law_triton",
    fake=lambda logits, temperature, top_k, top_p, min_p: logits.new_empty(
        logits.shape, dtype=accumulation_dtype(logits.dtype)
    ),
)
draw = register(
    "draw(Tensor weights, Tensor seed, Tensor position, Tensor base, int stream) -> Tensor",
    reference=draw_reference,
    cpu=draw_cpu,
    triton="stepgraph.kernels.sampling_triton:draw_triton",
    fake=lambda weights, seed, position, base, stream: seed.new_empty(seed.shape),
)
