"""Launchers of the attention kernels: shapes and dtypes in, `LaunchSpec`s out. Contracts in `reference` and `work`."""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from stepgraph.kernels import tables
from stepgraph.kernels.attention.kernels import merge_splits_kernel, uniform_decode_attention_kernel
from stepgraph.kernels.attention.reference import check_attention
from stepgraph.kernels.attention.work import SPLIT, work_capacity, work_size
from stepgraph.kernels.attention.work_triton import build_attention_work_triton
from stepgraph.kernels.launch import LaunchSpec, Target, check_blocks, check_kernel_dtype, dense, launch, target_of

# Longer queries (prefill chunks) have tiles enough to fill a device without splitting rows, and would need large scratch.
MAX_SPLIT_QUERY = 16


@dataclass(frozen=True)
class AttentionConfig:
    """How the kernel is tiled. `rows`, `tile_kv`, `num_warps` and `split` decide bits; the others do not.

    Attributes:
        rows: (query, head) pairs in a tile.
        tile_kv: keys in a tile.
        num_warps: as Triton takes it.
        kv_buffers: tiles of keys and values in flight.
        occupancy: programs per multiprocessor of the persistent grid.
        split: tokens per split.
    """

    rows: int
    tile_kv: int
    num_warps: int
    kv_buffers: int
    occupancy: int
    split: int = SPLIT

    @property
    def num_stages(self) -> int:
        """Pipeline stages: a key's address hangs on a load of its block id, so each tile in flight takes two."""
        return 1 + 2 * self.kv_buffers


def attention_config(q: Tensor, k_cache: Tensor, target: Target) -> AttentionConfig:
    """The frozen configuration for these shapes; fewer buffers where the device has less shared memory."""
    block_size, kv_heads, head_dim = k_cache.shape[1:]
    head_pad = max(16, triton.next_power_of_2(head_dim))
    config = AttentionConfig(
        **tables.lookup(
            "attention",
            arch=target.arch,
            query_len=q.shape[1],
            group=q.shape[2] // kv_heads,
            head_dim=head_dim,
            head_pad=head_pad,
            block_size=block_size,
            dtype=str(q.dtype).removeprefix("torch."),
        )
    )
    buffer_bytes = 2 * config.tile_kv * head_pad * k_cache.dtype.itemsize
    room = (target.shared_limit - config.rows * head_pad * q.dtype.itemsize) // buffer_bytes
    return replace(config, kv_buffers=max(1, min(config.kv_buffers, room)))


def scratch_size(capacity: int, query_len: int, num_heads: int, head_dim: int) -> int:
    """float32 elements of scratch: an accumulator, a maximum and a sum for each (entry, query, head)."""
    return capacity * query_len * num_heads * (head_dim + 2)


def uniform_decode_attention_triton(
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
    *,
    config: AttentionConfig | None = None,
    whole_rows: bool | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Same contract as `uniform_decode_attention_reference`, with a row's bits independent of Q, batch and neighbours.

    Args:
        work: the batch's work list, when the caller has built it; `split` of `config` must be the default then.
        scratch: float32, at least `scratch_size` elements, when the caller keeps one.
        config: overrides the frozen table.
        out: `[B, Q, H, D]` of q's dtype, contiguous, to write into instead of a new tensor.
        whole_rows: one program per row and query tile, without splits, list or scratch; same bits. Default for long queries.

    Raises:
        ValueError: the scratch or the work list is too small for the batch, or shapes are out of the kernel's reach.
    """
    check_kernel_dtype("uniform_decode_attention", q)
    check_attention(q, k_cache, v_cache, block_table, seq_lens, scale, window, softcap, kv_scales, work, scratch)
    check_blocks("uniform_decode_attention", k_cache=k_cache, v_cache=v_cache)
    batch, query_len, num_heads, head_dim = q.shape
    num_blocks, block_size, kv_heads, _ = k_cache.shape
    group, table_width = num_heads // kv_heads, block_table.shape[1]
    is_fp8 = k_cache.dtype.itemsize == 1
    target = target_of(q)
    config = config or attention_config(q, k_cache, target)
    if group > config.rows:
        raise ValueError(f"uniform_decode_attention: {group} query heads per KV head; the tile holds {config.rows} rows")
    if min(config.tile_kv, block_size) & (min(config.tile_kv, block_size) - 1) or config.split % config.tile_kv:
        raise ValueError(f"uniform_decode_attention: block size {block_size} is not a power of two")

    q = dense(q)
    # The kernels step through these one by one; only rows of the table may lie apart, as those of a wider one do.
    seq_lens = seq_lens.contiguous()
    block_table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    kv_scales = dense(kv_scales) if is_fp8 else None
    out = torch.empty_like(q) if out is None else out
    whole_rows = query_len > MAX_SPLIT_QUERY if whole_rows is None else whole_rows
    query_tiles = -(-query_len // (config.rows // group))
    table_tokens = table_width * block_size
    capacity = work_capacity(batch, table_tokens, num_blocks * block_size, config.split)
    partial = state = None
    if not whole_rows:
        if work is None:
            pool_tokens = num_blocks * block_size
            work = build_attention_work_triton(seq_lens, query_len, window, table_tokens, pool_tokens, config.split)
        work = work.contiguous()
        if work.numel() != work_size(batch, capacity):
            raise ValueError(f"uniform_decode_attention: work list of {work.numel()}, not {work_size(batch, capacity)}")
        needed = scratch_size(capacity, query_len, num_heads, head_dim)
        if scratch is None:
            scratch = q.new_empty(needed, dtype=torch.float32)
        if not scratch.is_contiguous():
            raise ValueError(f"uniform_decode_attention: scratch must be contiguous; strides are {scratch.stride()}")
        if scratch.numel() < needed:
            raise ValueError(f"uniform_decode_attention: scratch of {scratch.numel()} float32; allowed are {needed} or more")
        partial, state, _ = scratch.split_with_sizes(
            [needed // (head_dim + 2) * head_dim, needed // (head_dim + 2) * 2, scratch.numel() - needed]
        )

    items = (batch if whole_rows else capacity) * query_tiles * kv_heads
    # A persistent grid over (entry or row, query tile, KV head).
    launch(
        LaunchSpec(
            kernel=uniform_decode_attention_kernel,
            grid=(min(target.num_sms * config.occupancy, items),),
            args={
                "q_ptr": q,
                "k_ptr": k_cache,
                "v_ptr": v_cache,
                "block_table_ptr": block_table,
                "seq_lens_ptr": seq_lens,
                "scales_ptr": kv_scales,
                "work_ptr": work,
                "partial_ptr": partial,
                "state_ptr": state,
                "out_ptr": out,
                "batch": batch,
                "table_width": table_width,
                "table_stride": block_table.stride(0),
                "k_block_stride": k_cache.stride(0),
                "v_block_stride": v_cache.stride(0),
                "scale": scale,
                "softcap": softcap,
            },
            constexprs={
                "QUERY_LEN": query_len,
                "GROUP": group,
                "KV_HEADS": kv_heads,
                "HEAD_DIM": head_dim,
                "HEAD_PAD": max(16, triton.next_power_of_2(head_dim)),
                "BLOCK_SIZE": block_size,
                "WINDOW": window,
                "HAS_SOFTCAP": softcap > 0,
                "HAS_SCALES": is_fp8,
                "WHOLE_ROWS": whole_rows,
                "SPLIT": config.split,
                "ROWS": config.rows,
                "TILE_KV": config.tile_kv,
                "NUM_STAGES": config.num_stages,
            },
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    )
    if not whole_rows:
        head_tile = 4
        # One program per row, query and head_tile heads.
        launch(
            LaunchSpec(
                kernel=merge_splits_kernel,
                grid=(batch, query_len, -(-num_heads // head_tile)),
                args={
                    "seq_lens_ptr": seq_lens,
                    "work_ptr": work,
                    "partial_ptr": partial,
                    "state_ptr": state,
                    "out_ptr": out,
                    "table_tokens": table_tokens,
                    "query_len": query_len,
                },
                constexprs={
                    "HEADS": num_heads,
                    "HEAD_DIM": head_dim,
                    "HEAD_PAD": max(16, triton.next_power_of_2(head_dim)),
                    "WINDOW": window,
                    "SPLIT": config.split,
                    "HEAD_TILE": head_tile,
                    "NUM_STAGES": 3,
                },
                num_warps=2,
                num_stages=3,
            )
        )
    return out
