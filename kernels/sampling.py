"""From logits to a law, and from a law to a token.

The law of a row is softmax(logits / temperature), restricted in this order: min-p, top-k, top-p. Temperature 0 is the one-hot
law of the arg-max, ties to the lowest id. A draw is an exponential race, arg-min E_i / p_i with E_i ~ Exp(1), which is the
Gumbel-max trick without its logarithms: no sum over the vocabulary is needed, and a token of probability 0 can never win.
"""

import torch
from torch import Tensor

from stepgraph.kernels.checks import check_rows, check_tensor
from stepgraph.kernels.dtypes import accumulation_dtype
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


def check_law(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Raise a ValueError where `token_law` has no meaning."""
    check_tensor("token_law", "logits", logits, (None, None))
    check_rows("token_law", len(logits), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def check_draw(weights: Tensor, seed: Tensor, position: Tensor, base: Tensor) -> None:
    """Raise a ValueError where `draw` has no meaning."""
    check_tensor("draw", "weights", weights, (None, None))
    check_rows("draw", len(weights), seed=seed, position=position, base=base)


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
    check_law(logits, temperature, top_k, top_p, min_p)
    dtype = accumulation_dtype(logits.dtype)
    greedy = (temperature <= 0)[:, None]
    one_hot = torch.nn.functional.one_hot(greedy_tokens(logits), logits.shape[-1]).to(dtype)
    logits = finite_logits(logits.to(dtype))
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(greedy, 1.0, temperature[:, None]).to(dtype)
    law = scaled.softmax(-1)

    # p(x) ≥ min_p p(max), without rounding either side by the sum.
    kept = scaled >= min_p[:, None].to(dtype).log()
    order = torch.argsort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ranked_kept = kept.gather(-1, order) & ((top_k[:, None] <= 0) | (rank < top_k[:, None]))
    mass = torch.where(ranked_kept, law.gather(-1, order), 0.0)
    mass_before = mass.cumsum(-1) - mass
    # Summed by id, so that whoever knows the set need not rank it.
    total = torch.zeros_like(law).scatter(-1, order, mass).cumsum(-1)[:, -1:]
    enough = mass_before >= top_p[:, None].to(dtype) * total
    ranked_kept = ranked_kept & ((rank == 0) | ~enough | (top_p[:, None] >= 1))
    kept = torch.zeros_like(kept).scatter(-1, order, ranked_kept)

    law = torch.where(kept, scaled, -torch.inf).softmax(-1)
    return torch.where(greedy, one_hot, law)


def draw_reference(weights: Tensor, seed: Tensor, position: Tensor, base: Tensor, stream: int) -> Tensor:
    """`weights [N, V]` (non-negative, need not sum to 1), int64 `[N]` counters -> `[N]` int64 tokens drawn ∝ weights."""
    check_draw(weights, seed, position, base)
    race = weights.to(torch.float64) / exponential(seed, position, base, Stream(stream), weights.shape[-1])
    return race.argmax(-1)


def _fake_law(logits, temperature, top_k, top_p, min_p):
    check_law(logits, temperature, top_k, top_p, min_p)
    return logits.new_empty(logits.shape, dtype=accumulation_dtype(logits.dtype))


def _fake_draw(weights, seed, position, base, stream):
    check_draw(weights, seed, position, base)
    return seed.new_empty(seed.shape)


token_law = register(
    "token_law(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p) -> Tensor",
    reference=token_law_reference,
    cpu="stepgraph.kernels.sampling_cpu:token_law_cpu",
    triton="stepgraph.kernels.sampling_triton:token_law_triton",
    fake=_fake_law,
)
draw = register(
    "draw(Tensor weights, Tensor seed, Tensor position, Tensor base, int stream) -> Tensor",
    reference=draw_reference,
    cpu="stepgraph.kernels.sampling_cpu:draw_cpu",
    triton="stepgraph.kernels.sampling_triton:draw_triton",
    fake=_fake_draw,
)
