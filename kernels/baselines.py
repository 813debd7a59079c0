"""Other people's attention, for comparison: PyTorch's over gathered keys, and FlashInfer and flash-attn where installed."""

import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor


def sdpa_gathered(q, k_cache, v_cache, block_table, seq_lens, scale, window, softcap) -> Tensor:
    """`scaled_dot_product_attention` after gathering the blocks, which a caller without a paged kernel has to do."""
    query_len, groups = q.shape[1], q.shape[2] // k_cache.shape[2]
    keys, values = (
        cache[block_table].flatten(1, 2).transpose(1, 2).repeat_interleave(groups, 1) for cache in (k_cache, v_cache)
    )
    positions = seq_lens[:, None] - query_len + torch.arange(query_len, device=q.device)
    kv = torch.arange(keys.shape[2], device=q.device)
    visible = kv <= positions[:, :, None]
    if window > 0:
        visible &= kv > positions[:, :, None] - window
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=visible[:, None], scale=scale
    )
    return out.transpose(1, 2)


def flash_attn(q, k_cache, v_cache, block_table, seq_lens, scale, window, softcap) -> Tensor:
    """flash-attn's paged decode; it wants block sizes that are multiples of 256."""
    return importlib.import_module("flash_attn").flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=seq_lens.int(),
        block_table=block_table.int(),
        softmax_scale=scale,
        causal=True,
        window_size=(window - 1, 0) if window > 0 else (-1, -1),
        softcap=softcap,
    )


def flashinfer(q, k_cache, v_cache, block_table, seq_lens, scale, window, softcap) -> Tensor:
    """FlashInfer's paged prefill kernel, which serves several query tokens; planning is on the host and not timed."""
    batch, query_len, heads, head_dim = q.shape
    key = (q.data_ptr(), q.shape)
    if key not in _PLANS:
        block_size = k_cache.shape[1]
        blocks = (seq_lens + block_size - 1) // block_size
        workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=q.device)
        wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        zero = torch.zeros(1, dtype=torch.int32, device=q.device)
        wrapper.plan(
            torch.arange(batch + 1, dtype=torch.int32, device=q.device) * query_len,
            torch.cat([zero, blocks.cumsum(0).int()]),
            torch.cat([block_table[row, : int(count)] for row, count in enumerate(blocks)]).int(),
            ((seq_lens - 1) % block_size + 1).int(),
            heads,
            k_cache.shape[2],
            head_dim,
            block_size,
            causal=True,
            sm_scale=scale,
            window_left=window - 1 if window > 0 else -1,
            logits_soft_cap=softcap or None,
            q_data_type=q.dtype,
        )
        _PLANS[key] = wrapper
    return _PLANS[key].run(q.flatten(0, 1), (k_cache, v_cache)).view_as(q)


_PLANS: dict = {}  # by the query's address: each argument set of a cold timing has its own

# provider -> (module it needs, function)
ATTENTION: dict[str, tuple[str, Callable]] = {
    "torch-sdpa-gathered": ("torch", sdpa_gathered),
    "flashinfer": ("flashinfer", flashinfer),
    "flash-attn": ("flash_attn", flash_attn),
}


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
