"""Uniform-decode attention on the CPU: each query row attends over exactly the keys it may see.

Every row is a call of its own with the shape a one-token query at that position would have, so that its bits do not depend
on Q, batch or padding. Lengths are read on the host, which the CPU may do: the op is opaque to a trace.
"""

import torch
from torch import Tensor

from stepgraph.kernels.attention.reference import read_cache
from stepgraph.kernels.dtypes import accumulation_dtype

# Beyond this query length (prefill chunks) rows share one call; a chunk's bits may depend on its length.
MAX_ROWWISE_QUERY = 32
ALIGNMENT_BYTES = 64


def require_blocks(least: int, most: int, num_blocks: int) -> None:
    """A ValueError for a block that a cache of `num_blocks` does not have."""
    for block in (least, most):
        if not 0 <= block < num_blocks:
            raise ValueError(f"uniform_decode_attention: block_table has {block}; allowed are blocks 0 to {num_blocks - 1}")


def uniform_decode_attention_cpu(
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
    """Same contract as `uniform_decode_attention_reference`, and a ValueError for a block that the cache does not have."""
    if block_table.numel():
        require_blocks(*map(int, block_table.aminmax()), len(k_cache))
    out = q.new_zeros(q.shape)
    block_size, query_len = k_cache.shape[1], q.shape[1]
    capacity = block_table.shape[1] * block_size
    k_scales, v_scales = (None, None) if kv_scales is None else kv_scales.unbind(0)
    for row, seq_len in enumerate(seq_lens.tolist()):
        stored = min(seq_len, capacity)
        if stored <= 0:
            continue
        # [blocks, block_size, KV, D] -> [KV, S, D]
        blocks = block_table[row, : -(-stored // block_size)]
        keys, values = (
            _read(cache, blocks, scales, accumulation_dtype(q.dtype)).flatten(0, 1).transpose(0, 1)
            for cache, scales in ((k_cache, k_scales), (v_cache, v_scales))
        )
        first = seq_len - query_len
        if query_len > MAX_ROWWISE_QUERY:
            out[row] = _chunk(q[row], keys[:, :stored], values[:, :stored], first, scale, window, softcap)
            continue
        for i in range(max(0, -first), query_len):
            stop = min(first + i + 1, capacity)
            start = max(0, first + i + 1 - window) if window > 0 else 0
            # The query is copied out: an unaligned one could take another path through the BLAS than an aligned one.
            out[row, i] = _one_query(q[row, i].clone(), keys[:, start:stop], values[:, start:stop], scale, softcap)
    return out


def _read(cache: Tensor, blocks: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`cache [blocks, block_size, KV, D]` at `blocks [n]`: in place where they lie side by side, as they mostly do, since
    blocks are handed out in order. A copy is aligned, so a view has to be, or the BLAS could take another path.
    """
    first, count = int(blocks[0]), len(blocks)
    aligned = cache.stride(0) * cache.itemsize % ALIGNMENT_BYTES == 0
    if cache.itemsize > 1 and aligned and blocks.tolist() == list(range(first, first + count)):
        return cache[first : first + count]
    return read_cache(cache, blocks, scales, cache.dtype if cache.itemsize > 1 else dtype)


def _one_query(q: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float) -> Tensor:
    """`q [H, D]` over `keys, values [KV, S, D]`, all of them visible -> `[H, D]`."""
    if softcap == 0.0 and q.dtype in (torch.float32, torch.float64):
        # The heads that share a key head are the queries of one call: no copy of keys for each of them.
        grouped = q.view(1, keys.shape[0], -1, q.shape[-1])
        out = torch.nn.functional.scaled_dot_product_attention(grouped, keys[None], values[None], scale=scale)
        return out.reshape(q.shape)
    return _chunk(q[None], keys, values, keys.shape[1] - 1, scale, 0, softcap)[0]


def _chunk(q: Tensor, keys: Tensor, values: Tensor, first: int, scale: float, window: int, softcap: float) -> Tensor:
    """`q [Q, H, D]` whose query 0 sits at position `first`, over `keys, values [KV, S, D]` -> `[Q, H, D]`."""
    dtype = accumulation_dtype(q.dtype)
    query_len, heads, head_dim = q.shape
    if query_len > 1 and window == 0 and softcap == 0 and first >= 0:
        parts = (part.to(dtype)[None] for part in (q.transpose(0, 1), keys, values))
        mask = torch.arange(keys.shape[1]) <= torch.arange(first, first + query_len)[:, None]
        out = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1).to(q.dtype)
    grouped = q.to(dtype).view(query_len, keys.shape[0], -1, head_dim).permute(1, 2, 0, 3)  # [KV, G, Q, D]
    scores = grouped.flatten(1, 2) @ keys.to(dtype).transpose(1, 2) * scale  # [KV, G Q, S]
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    positions = torch.arange(first, first + query_len)[:, None]
    kv_positions = torch.arange(keys.shape[1])
    visible = kv_positions <= positions
    if window > 0:
        visible &= kv_positions > positions - window
        values = values.masked_fill(~visible.any(0)[:, None], 0.0)  # a NaN that no query may see stays there
    scores = scores.view(*grouped.shape[:3], -1).masked_fill(~visible, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~visible, 0.0)
    out = weights.flatten(1, 2) @ values.to(dtype)
    return out.view(*grouped.shape).permute(2, 0, 1, 3).reshape(query_len, heads, head_dim).to(q.dtype)
