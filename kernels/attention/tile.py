"""Device functions of attention: one split of keys under one tile of queries, and the merge of two softmax states.

Softmax over splits (Dao et al. 2023, Flash-Decoding): a split gives m = max s, mass = Σ 2^(s − m), acc = Σ 2^(s − m) v, and
states are merged left to right in split order:

    m' = max(m, m_s),  mass' = mass 2^(m − m') + mass_s 2^(m_s − m'),  acc' likewise,  out = acc / mass.

A tile holds ROWS (query, head of the group) pairs of one KV head, whatever Q is; a pair that may not see a key gives it weight
0, which changes no bit of that pair's sums. So a row's bits depend on its own keys and position alone.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh without libdevice: (1 − e) / (1 + e) with e = exp(−2|x|); its Taylor series where that would cancel."""
    x2 = x * x
    series = x * (1.0 + x2 * (-1.0 / 3 + x2 * (2.0 / 15 + x2 * (-17.0 / 315 + x2 * (62.0 / 2835)))))
    e = tl.exp(-2.0 * tl.abs(x))
    ratio = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.3, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def merge_states(m, mass, acc, m_split, mass_split, acc_split):
    """The state after one more split; a state that has seen nothing has m = −inf, mass = 0, acc = 0."""
    m_new = tl.maximum(m, m_split)
    finite = tl.where(m_new == float("-inf"), 0.0, m_new)
    old, new = tl.exp2(m - finite), tl.exp2(m_split - finite)
    return m_new, mass * old + mass_split * new, acc * old[:, None] + acc_split * new[:, None]


@triton.jit
def attend_split(
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
    """(m, mass, acc) of the keys at positions [begin, end) of one split; `begin` is a multiple of TILE_KV."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    columns = tl.arange(0, HEAD_PAD)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
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
            scores = softcap * tanh(scores / softcap) * LOG2_E
        visible = (kv[None, :] <= positions[:, None]) & stored[None, :]
        if WINDOW > 0:
            visible = visible & (kv[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, axis=1))
        finite = tl.where(m_new == float("-inf"), 0.0, m_new)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(m - finite)
        mass = mass * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        m = m_new
    return m, mass, acc
