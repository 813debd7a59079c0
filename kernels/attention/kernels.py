"""Triton kernels of uniform-decode attention: build the work list, attend one (row, split), merge the splits.

Softmax over splits (Dao 2023, Flash-Decoding): each split gives m = max s, l = Σ 2^(s − m), a = Σ 2^(s − m) v, and states are
merged left to right in split order:  m' = max(m, m_s),  l' = l 2^(m − m') + l_s 2^(m_s − m'),  a' likewise,  out = a / l.

A tile holds ROWS (query, head of the group) pairs of one KV head, whatever Q is; a pair that may not see a key gives it weight
0, which changes no bit of that pair's sums. So a row's bits depend on its own keys and position alone.
"""

import triton
import triton.language as tl


@triton.jit
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


@triton.jit
def _tanh(x):
    """tanh without libdevice: (1 − e) / (1 + e) with e = exp(−2|x|); its Taylor series where that would cancel."""
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    e = tl.exp(-2.0 * tl.abs(x))
    ratio = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.3, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def _merge(m, l, acc, m_split, l_split, acc_split):
    """The state after one more split; a state that has seen nothing has m = −inf, l = 0, acc = 0."""
    m_new = tl.maximum(m, m_split)
    finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    old, new = tl.exp2(m - finite), tl.exp2(m_split - finite)
    return m_new, l * old + l_split * new, acc * old[:, None] + acc_split * new[:, None]


@triton.jit
def _attend_split(
    q,  # [ROWS, HEAD_PAD]
    positions,  # [ROWS]
    begin,
    end,
    table_ptr,  # the row's block table
    k_ptr,  # at the KV head
    v_ptr,
    k_block_stride,
    v_block_stride,
    scale_log2,
    softcap,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_KV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """(m, l, acc) of the keys at positions [begin, end) of one split; `begin` is a multiple of TILE_KV."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    columns = tl.arange(0, HEAD_PAD)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)  # noqa: E741
    acc = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    for start in tl.range(begin, end, TILE_KV, num_stages=NUM_STAGES):
        kv = start + tl.arange(0, TILE_KV)
        stored = kv < end
        if TILE_KV <= BLOCK_SIZE:
            block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
            lane = start % BLOCK_SIZE + tl.arange(0, TILE_KV)
        else:
            block = tl.load(table_ptr + kv // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)  # [TILE_KV]
            lane = kv % BLOCK_SIZE
        loaded = stored[:, None]
        if HEAD_PAD != HEAD_DIM:
            loaded = loaded & (columns < HEAD_DIM)[None, :]
        # What lies beyond the row's length is loaded as 0, never read: a NaN there must not meet a weight of 0.
        k_offset = (block * k_block_stride + lane * TOKEN_STRIDE)[:, None] + columns[None, :]
        k = tl.load(k_ptr + k_offset, mask=loaded, other=0.0).to(q.dtype)  # [TILE_KV, HEAD_PAD]
        v_offset = (block * v_block_stride + lane * TOKEN_STRIDE)[:, None] + columns[None, :]
        v = tl.load(v_ptr + v_offset, mask=loaded, other=0.0).to(q.dtype)  # [TILE_KV, HEAD_PAD]

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [ROWS, TILE_KV]
        if HAS_SOFTCAP:
            scores = softcap * _tanh(scores / softcap) * LOG2_E
        visible = (kv[None, :] <= positions[:, None]) & stored[None, :]
        if WINDOW > 0:
            visible = visible & (kv[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(m - finite)
        l = l * shrink + tl.sum(weights, axis=1)  # noqa: E741
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        m = m_new
    return m, l, acc


@triton.jit
def uniform_decode_attention_kernel(
    q_ptr,  # [B, Q, H, D]
    k_ptr,  # [blocks, BLOCK_SIZE, KV, D]
    v_ptr,
    block_table_ptr,  # [B, M]
    seq_lens_ptr,  # [B]
    scales_ptr,  # [2, KV] or None
    work_ptr,  # the work list; not read when WHOLE_ROWS
    partial_ptr,  # [entries, Q, H, D] float32
    state_ptr,  # [entries, Q, H, 2] float32: m, l
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
        l = tl.zeros([ROWS], tl.float32)  # noqa: E741
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
            m_split, l_split, acc_split = _attend_split(
                q, positions, begin, end, table_ptr, k_head_ptr, v_head_ptr, k_block_stride, v_block_stride, score_scale,
                softcap, WINDOW, HAS_SOFTCAP, BLOCK_SIZE, TOKEN_STRIDE, HEAD_DIM, HEAD_PAD, ROWS, TILE_KV, NUM_STAGES,
            )  # fmt: skip
            if HAS_SCALES:
                acc_split = acc_split * tl.load(scales_ptr + KV_HEADS + kv_head)
            if WHOLE_ROWS:
                m, l, acc = _merge(m, l, acc, m_split, l_split, acc_split)
            else:
                m, l, acc = m_split, l_split, acc_split
            split += 1

        if WHOLE_ROWS or num_splits == 1:
            out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
            target = query_row[:, None] * HEAD_DIM + columns[None, :]
            tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            partial_row = (entry.to(tl.int64) * QUERY_LEN + query) * HEADS + head
            tl.store(partial_ptr + partial_row[:, None] * HEAD_DIM + columns[None, :], acc, mask=inside)
            tl.store(state_ptr + partial_row * 2, m, mask=live)
            tl.store(state_ptr + partial_row * 2 + 1, l, mask=live)


@triton.jit
def merge_splits_kernel(
    seq_lens_ptr,  # [B]
    work_ptr,
    partial_ptr,  # [entries, Q, H, D] float32
    state_ptr,  # [entries, Q, H, 2] float32
    out_ptr,  # [B, Q, H, D]
    table_tokens,
    QUERY_LEN: tl.constexpr,
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
        first_split = tl.maximum(seq_len - QUERY_LEN - WINDOW + 1, 0) // SPLIT
    num_splits = tl.maximum((tl.minimum(seq_len, table_tokens) + SPLIT - 1) // SPLIT - first_split, 0)
    offset = tl.load(work_ptr + 2 + row)
    if (num_splits != 1) | (offset < 0):
        live = head < HEADS
        inside = live[:, None] & (columns < HEAD_DIM)[None, :]
        m = tl.full([HEAD_TILE], float("-inf"), tl.float32)
        l = tl.zeros([HEAD_TILE], tl.float32)  # noqa: E741
        acc = tl.zeros([HEAD_TILE, HEAD_PAD], tl.float32)
        num_splits = tl.where(offset < 0, 0, num_splits)
        for index in tl.range(0, num_splits, num_stages=NUM_STAGES):
            partial_row = ((offset + index).to(tl.int64) * QUERY_LEN + query) * HEADS + head  # [HEAD_TILE]
            m_split = tl.load(state_ptr + partial_row * 2, mask=live, other=float("-inf"))
            l_split = tl.load(state_ptr + partial_row * 2 + 1, mask=live, other=0.0)
            acc_split = tl.load(partial_ptr + partial_row[:, None] * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
            m, l, acc = _merge(m, l, acc, m_split, l_split, acc_split)
        out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        out = tl.where(offset < 0, float("nan"), out)
        target = ((row.to(tl.int64) * QUERY_LEN + query) * HEADS + head)[:, None] * HEAD_DIM + columns[None, :]
        tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=inside)
