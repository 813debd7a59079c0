"""Triton kernel that builds attention's work list; contract in `stepgraph.kernels.attention.work`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.attention.work import SPLIT, check_work, work_capacity, work_size
from stepgraph.kernels.launch import LaunchSpec, launch

MAX_BATCH = 4096  # rows whose lengths one program holds


@triton.jit(do_not_specialize=["batch", "query_len", "table_tokens", "capacity"])
def build_attention_work_kernel(
    seq_lens_ptr,  # [B]
    work_ptr,  # [2 + B + 2 CAPACITY]
    batch,
    query_len,
    table_tokens,
    capacity,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BATCH_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program b writes row b's offset and entries; it counts the entries of all rows itself, so no program waits."""
    rows = tl.arange(0, BATCH_PAD)
    seq_lens = tl.load(seq_lens_ptr + rows, mask=rows < batch, other=0).to(tl.int64)  # [BATCH_PAD]
    first = tl.zeros_like(seq_lens)
    if WINDOW > 0:
        first = tl.maximum(seq_lens - query_len - WINDOW + 1, 0) // SPLIT
    stop = tl.minimum(seq_lens, table_tokens)
    count = tl.maximum((stop + SPLIT - 1) // SPLIT - first, 0)
    end = tl.cumsum(count, axis=0)
    fitting_end = tl.where(end <= capacity, end, 0)

    row = tl.program_id(0)
    if row == 0:
        tl.store(work_ptr, tl.max(fitting_end, axis=0).to(tl.int32))
        tl.store(work_ptr + 1, tl.sum(count, axis=0).to(tl.int32))
    my_first = tl.sum(tl.where(rows == row, first, 0), axis=0)
    my_count = tl.sum(tl.where(rows == row, count, 0), axis=0)
    my_end = tl.sum(tl.where(rows == row, end, 0), axis=0)
    my_offset = my_end - my_count
    tl.store(work_ptr + 2 + row, tl.where(my_end <= capacity, my_offset, -1).to(tl.int32))
    my_count = tl.where(my_end <= capacity, my_count, 0)
    entries_ptr = work_ptr + 2 + batch + 2 * my_offset
    for start in range(0, my_count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(entries_ptr + 2 * index, tl.zeros_like(index) + row, mask=index < my_count)
        tl.store(entries_ptr + 2 * index + 1, (my_first + index).to(tl.int32), mask=index < my_count)


def build_attention_work_triton(
    seq_lens: Tensor, query_len: int, window: int, table_tokens: int, pool_tokens: int, split: int = SPLIT
) -> Tensor:
    """Same contract as `build_attention_work_reference`; list entries beyond the count are undefined."""
    check_work(seq_lens, query_len, window, table_tokens, pool_tokens, split)
    batch = seq_lens.shape[0]
    if batch > MAX_BATCH:
        raise ValueError(f"build_attention_work: batch {batch}; at most {MAX_BATCH}")
    capacity = work_capacity(batch, table_tokens, pool_tokens, split)
    work = seq_lens.new_empty(work_size(batch, capacity), dtype=torch.int32)
    # One program per row.
    launch(
        LaunchSpec(
            kernel=build_attention_work_kernel,
            grid=(batch,),
            args={
                "seq_lens_ptr": seq_lens.contiguous(),
                "work_ptr": work,
                "batch": batch,
                "query_len": query_len,
                "table_tokens": table_tokens,
                "capacity": capacity,
            },
            constexprs={"WINDOW": window, "SPLIT": split, "BATCH_PAD": triton.next_power_of_2(batch), "BLOCK": 64},
            num_warps=4,
        )
    )
    return work
