"""The specification of uniform-decode attention: gather, mask, softmax; no host read, any float dtype."""

import torch
from einops import rearrange, repeat
from torch import Tensor

from stepgraph.kernels.checks import INDEX, check_cache, check_tensor
from stepgraph.kernels.dtypes import accumulation_dtype


def read_cache(cache: Tensor, blocks: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`cache [blocks, block_size, KV, D]` at `blocks [...]` -> `[..., block_size, KV, D]` in `dtype`; fp8 × `scales [KV]`."""
    if cache.dtype.itemsize > 1:
        return cache[blocks].to(dtype)
    if scales is None:
        raise ValueError(f"a KV cache of {cache.dtype} needs kv_scales [2, KV]")
    values = cache.view(torch.uint8)[blocks].view(cache.dtype)  # indexing has no fp8
    return values.to(dtype) * scales[:, None].to(dtype)


def check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    kv_scales: Tensor | None = None,
    work: Tensor | None = None,
    scratch: Tensor | None = None,
) -> None:
    """Raise a ValueError where `uniform_decode_attention` has no meaning."""
    op = "uniform_decode_attention"
    check_tensor(op, "q", q, (None, None, None, None))
    check_cache(op, k_cache, v_cache, kv_scales, head_dim=q.shape[3])
    if k_cache.dtype != q.dtype and k_cache.dtype.itemsize > 1:
        raise ValueError(f"{op}: k_cache is {k_cache.dtype}; allowed is q's {q.dtype}, or fp8")
    heads, kv_heads = q.shape[2], k_cache.shape[2]
    if heads == 0 or heads % kv_heads:
        raise ValueError(f"{op}: q has {heads} heads; allowed are multiples of the cache's {kv_heads}")
    check_tensor(op, "block_table", block_table, (q.shape[0], None), INDEX)
    check_tensor(op, "seq_lens", seq_lens, (q.shape[0],), INDEX)
    if work is not None:
        check_tensor(op, "work", work, (None,), torch.int32)
    if scratch is not None:
        check_tensor(op, "scratch", scratch, (None,), torch.float32)


def uniform_decode_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    kv_scales: Tensor | None = None,
    work: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """Causal attention of Q query tokens per row over that row's cached keys and values.

    Query i of row b sits at position `seq_lens[b] - Q + i` and sees positions up to its own (the last `window` of them when
    `window > 0`). Scores are `scale * q·k`, passed through `softcap * tanh(score / softcap)` when `softcap > 0`. A query at a
    negative position, and every query of a row with `seq_lens == 0`, gives zeros. A key or value that is not finite spoils
    the queries that see it and no other; in the Triton kernel, and in chunks of more than 32 queries on the CPU, such a value
    can also reach the row's earlier queries.

    Args:
        q: `[B, Q, H, D]`.
        k_cache, v_cache: `[blocks, block_size, KV, D]` in q's dtype or fp8, H a multiple of KV.
        block_table: `[B, M]` int64 or int32; entries beyond a row's length may be anything in range.
        seq_lens: `[B]` int64 or int32.
        kv_scales: `[2, KV]` float32, what keys (row 0) and values (row 1) of an fp8 cache are multiplied by; else ignored.
        work: the batch's list from `build_attention_work`, for kernels that split rows; built inside where it is None.
        scratch: float32 space that such a kernel may overwrite; allocated inside where it is None.

    Returns:
        `[B, Q, H, D]` in q's dtype.
    """
    query_len, groups = q.shape[1], q.shape[2] // k_cache.shape[2]
    dtype = accumulation_dtype(q.dtype)
    k_scales, v_scales = (None, None) if kv_scales is None else kv_scales.unbind(0)
    keys, values = (
        repeat(read_cache(cache, block_table, scales, dtype), "b m s kv d -> b (m s) (kv g) d", g=groups)
        for cache, scales in ((k_cache, k_scales), (v_cache, v_scales))
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
    # What a query may not see is masked before the softmax and zeroed after it. Since 0 × NaN is NaN, values that are not
    # finite are left out of the sum and reach the queries that see them on their own.
    weights = torch.where(visible, scores, -torch.inf).softmax(-1)
    weights = torch.where(visible, weights, 0.0)
    finite = values.isfinite()
    out = torch.einsum("bhqs,bshd->bqhd", weights, torch.where(finite, values, 0.0))
    spoilt = torch.einsum("bqs,bshd->bqhd", visible[:, 0].to(dtype), (~finite).to(dtype)) > 0
    return torch.where(spoilt, torch.nan, out).to(q.dtype).contiguous()
