"""The specification of uniform-decode attention: gather, mask, softmax; no host read, any float dtype."""

import torch
from einops import rearrange, repeat
from torch import Tensor

from stepgraph.kernels.norm import accumulation_dtype


def uniform_decode_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """Causal attention of Q query tokens per row over that row's cached keys and values.

    Query i of row b sits at position `seq_lens[b] - Q + i` and sees positions up to its own (the last `window` of them when
    `window > 0`). Scores are `scale * q·k`, passed through `softcap * tanh(score / softcap)` when `softcap > 0`. A query at a
    negative position, and every query of a row with `seq_lens == 0`, gives zeros.

    Args:
        q: `[B, Q, H, D]`.
        k_cache, v_cache: `[blocks, block_size, KV, D]`, H a multiple of KV.
        block_table: `[B, M]` int64; entries beyond a row's length may be anything in range.
        seq_lens: `[B]` int64.

    Returns:
        `[B, Q, H, D]` in q's dtype.
    """
    query_len, groups = q.shape[1], q.shape[2] // k_cache.shape[2]
    dtype = accumulation_dtype(q.dtype)
    keys, values = (
        repeat(cache[block_table].to(dtype), "b m s kv d -> b (m s) (kv g) d", g=groups) for cache in (k_cache, v_cache)
    )
    positions = seq_lens[:, None] - query_len + torch.arange(query_len, device=q.device)
    kv_positions = torch.arange(keys.shape[1], device=q.device)
    visible = kv_positions <= positions[:, :, None]
    if window > 0:
        visible = visible & (kv_positions > positions[:, :, None] - window)
    visible = rearrange(visible & (seq_lens > 0)[:, None, None], "b q s -> b 1 q s")

    scores = torch.einsum("bqhd,bshd->bhqs", q.to(dtype), keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    # What no query may see is masked before the softmax and zeroed after it: a NaN in an unused lane stays there.
    weights = torch.where(visible, scores, -torch.inf).softmax(-1)
    weights = torch.where(visible, weights, 0.0)
    values = torch.where(visible.any(2).any(1)[:, :, None, None], values, 0.0)
    return torch.einsum("bhqs,bshd->bqhd", weights, values).to(q.dtype)
