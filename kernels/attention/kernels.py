"""Triton kernels of uniform-decode attention: attend the splits, merge the splits. The arithmetic is in `tile`."""

import triton
import triton.language as tl

from stepgraph.kernels.attention.tile import attend_split, merge_states


# Numbers that vary with the batch are not specialised on: every batch runs the same code.
@triton.jit(do_not_specialize=["batch", "table_width", "table_stride"])
def uniform_decode_attention_kernel(
    q_ptr,  # [B, Q, H, D]
    k_ptr,  # [blocks, BLOCK_SIZE, KV, D]
    v_ptr,
    block_table_ptr,  # [B, M]
    seq_lens_ptr,  # [B]
    scales_ptr,  # [2, KV] or None
    work_ptr,  # the work list; not read when WHOLE_ROWS
    partial_ptr,  # [entries, Q, H, D] float32
    state_ptr,  # [entries, Q, H, 2] float32: m, mass
    out_ptr,  # [B, Q, H, D]
    batch,
    table_width,
    table_stride,
    k_block_stride,
    v_block_stride,
    scale,
    softcap,
    QUERY_LEN: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    WHOLE_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_KV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Persistent: each program takes every num_programs-th (row, split, query tile, KV head).

    With WHOLE_ROWS an item is a whole row, its splits merged here in the order the merge kernel would take: same bits.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    TILE_QUERIES: tl.constexpr = ROWS // GROUP
    QUERY_TILES: tl.constexpr = (QUERY_LEN + TILE_QUERIES - 1) // TILE_QUERIES
    HEADS: tl.constexpr = GROUP * KV_HEADS
    TOKEN_STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    # Without a soft-cap the change from e to 2 as the base is part of the scale; with one it comes after the cap.
    if not HAS_SOFTCAP:
        scale = scale * LOG2_E
    tile_row = tl.arange(0, ROWS)
    columns = tl.arange(0, HEAD_PAD)
    if WHOLE_ROWS:
        entries = batch
    else:
        entries = tl.load(work_ptr)
    for item in range(tl.program_id(0), entries * (QUERY_TILES * KV_HEADS), tl.num_programs(0)):
        kv_head = item % KV_HEADS
        first_query = item // KV_HEADS % QUERY_TILES * TILE_QUERIES
        entry = item // (KV_HEADS * QUERY_TILES)
        if WHOLE_ROWS:
            row = entry
        else:
            row = tl.load(work_ptr + 2 + batch + 2 * entry)
        seq_len = tl.load(seq_lens_ptr + row).to(tl.int32)

        query = first_query + tile_row // GROUP
        head = kv_head * GROUP + tile_row % GROUP
        live = (tile_row < TILE_QUERIES * GROUP) & (query < QUERY_LEN)
        positions = tl.where(live, seq_len - QUERY_LEN + query, -1)
        # Keys that some query of the tile sees lie in [lowest, stop).
        stop = tl.minimum(seq_len - QUERY_LEN + tl.minimum(first_query + TILE_QUERIES, QUERY_LEN), table_width * BLOCK_SIZE)
        lowest = 0
        first_split = 0
        if WINDOW > 0:
            lowest = tl.maximum(seq_len - QUERY_LEN + first_query - WINDOW + 1, 0)
            first_split = tl.maximum(seq_len - QUERY_LEN - WINDOW + 1, 0) // SPLIT
        num_splits = (tl.minimum(seq_len, table_width * BLOCK_SIZE) + SPLIT - 1) // SPLIT - first_split

        query_row = (row.to(tl.int64) * QUERY_LEN + query) * HEADS + head  # [ROWS]
        inside = live[:, None] & (columns < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + query_row[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)  # [ROWS, HEAD_PAD]
        table_ptr = block_table_ptr + row.to(tl.int64) * table_stride
        k_head_ptr = k_ptr + kv_head * HEAD_DIM
        v_head_ptr = v_ptr + kv_head * HEAD_DIM
        score_scale = scale
        if HAS_SCALES:
            score_scale = scale * tl.load(scales_ptr + kv_head)

        m = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
        if WHOLE_ROWS:
            split = lowest // SPLIT
            split_stop = (stop + SPLIT - 1) // SPLIT
        else:
            split = tl.load(work_ptr + 2 + batch + 2 * entry + 1)
            split_stop = split + 1
        while split < split_stop:
            begin = tl.maximum(split * SPLIT, lowest // TILE_KV * TILE_KV)
            end = tl.minimum(split * SPLIT + SPLIT, stop)
            m_split, mass_split, acc_split = attend_split(
                q, positions, begin, end, table_ptr, k_head_ptr, v_head_ptr, k_block_stride, v_block_stride, score_scale,
                softcap, WINDOW, HAS_SOFTCAP, BLOCK_SIZE, TOKEN_STRIDE, HEAD_DIM, HEAD_PAD, ROWS, TILE_KV, NUM_STAGES,
            )  # fmt: skip
            if HAS_SCALES:
                acc_split = acc_split * tl.load(scales_ptr + KV_HEADS + kv_head)
            if WHOLE_ROWS:
                m, mass, acc = merge_states(m, mass, acc, m_split, mass_split, acc_split)
            else:
                m, mass, acc = m_split, mass_split, acc_split
            split += 1

        if WHOLE_ROWS or num_splits == 1:
            out = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
            target = query_row[:, None] * HEAD_DIM + columns[None, :]
            tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            partial_row = (entry.to(tl.int64) * QUERY_LEN + query) * HEADS + head
            tl.store(partial_ptr + partial_row[:, None] * HEAD_DIM + columns[None, :], acc, mask=inside)
            tl.store(state_ptr + partial_row * 2, m, mask=live)
            tl.store(state_ptr + partial_row * 2 + 1, mass, mask=live)


@triton.jit(do_not_specialize=["table_tokens", "query_len"])
def merge_splits_kernel(
    seq_lens_ptr,  # [B]
    work_ptr,
    partial_ptr,  # [entries, Q, H, D] float32
    state_ptr,  # [entries, Q, H, 2] float32
    out_ptr,  # [B, Q, H, D]
    table_tokens,
    query_len,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Program (row, query, head tile) merges its splits left to right. Rows of one split are done already."""
    row = tl.program_id(0)
    query = tl.program_id(1)
    head = tl.program_id(2) * HEAD_TILE + tl.arange(0, HEAD_TILE)
    columns = tl.arange(0, HEAD_PAD)
    seq_len = tl.load(seq_lens_ptr + row).to(tl.int32)
    first_split = 0
    if WINDOW > 0:
        first_split = tl.maximum(seq_len - query_len - WINDOW + 1, 0) // SPLIT
    num_splits = tl.maximum((tl.minimum(seq_len, table_tokens) + SPLIT - 1) // SPLIT - first_split, 0)
    offset = tl.load(work_ptr + 2 + row)
    if (num_splits != 1) | (offset < 0):
        live = head < HEADS
        inside = live[:, None] & (columns < HEAD_DIM)[None, :]
        m = tl.full([HEAD_TILE], float("-inf"), tl.float32)
        mass = tl.zeros([HEAD_TILE], tl.float32)
        acc = tl.zeros([HEAD_TILE, HEAD_PAD], tl.float32)
        num_splits = tl.where(offset < 0, 0, num_splits)
        for index in tl.range(0, num_splits, num_stages=NUM_STAGES):
            partial_row = ((offset + index).to(tl.int64) * query_len + query) * HEADS + head  # [HEAD_TILE]
            m_split = tl.load(state_ptr + partial_row * 2, mask=live, other=float("-inf"))
            mass_split = tl.load(state_ptr + partial_row * 2 + 1, mask=live, other=0.0)
            acc_split = tl.load(partial_ptr + partial_row[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
            m, mass, acc = merge_states(m, mass, acc, m_split, mass_split, acc_split)
        out = acc / tl.where(mass == 0.0, 1.0, mass)[:, None]
        out = tl.where(offset < 0, float("nan"), out)
        target = ((row.to(tl.int64) * query_len + query) * HEADS + head)[:, None] * HEAD_DIM + columns[None, :]
        tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=inside)
