"""Requests for uniform-decode attention, and its contract as a loop over queries in float64."""

import numpy as np
import torch


def world(
    lengths, query_len, *, heads=4, kv_heads=2, head_dim=8, block_size=4, blocks=None, dtype=torch.float64, seed=0
) -> dict:
    """Rows of the given lengths over scattered blocks; block 0 belongs to nobody."""
    g = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    per_row = blocks or -(-max(*lengths, 1) // block_size)

    def normal(*shape):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)

    return {
        "q": normal(rows, query_len, heads, head_dim),
        "k_cache": normal(rows * per_row + 1, block_size, kv_heads, head_dim),
        "v_cache": normal(rows * per_row + 1, block_size, kv_heads, head_dim),
        "block_table": (torch.randperm(rows * per_row, generator=g) + 1).view(rows, per_row),
        "seq_lens": torch.tensor(lengths),
        "scale": head_dim**-0.5,
        "window": 0,
        "softcap": 0.0,
    }


def call(function, inputs, **changes):
    return function(*(inputs | changes).values())


def attend(q, k_cache, v_cache, block_table, seq_lens, scale, window, softcap):
    """The contract, one query and one head at a time: `(output, a bound of the absolute rounding error for eps = 1)`."""
    q, k_cache, v_cache = (t.double().numpy() for t in (q, k_cache, v_cache))
    query_len, heads = q.shape[1:3]
    block_size, kv_heads = k_cache.shape[1:3]
    out, bound = np.zeros(q.shape), np.zeros(q.shape[:3])
    for row, length in enumerate(seq_lens.tolist()):
        for i in range(query_len):
            position = length - query_len + i
            if length == 0 or position < 0:
                continue
            seen = [
                p for p in range(block_table.shape[1] * block_size) if p <= position and (window <= 0 or p > position - window)
            ]
            if not seen:
                continue
            block = block_table[row].numpy()[np.array(seen) // block_size]
            lane = np.array(seen) % block_size
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                keys, values = k_cache[block, lane, kv_head], v_cache[block, lane, kv_head]
                scores = keys @ q[row, i, head] * scale
                size = (np.abs(keys) @ np.abs(q[row, i, head])).max() * abs(scale)
                if softcap > 0:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                out[row, i, head] = weights @ values
                bound[row, i, head] = (4 + size) * np.abs(values).max()
    return torch.from_numpy(out), torch.from_numpy(bound)[..., None]


def assert_close(function, inputs, **changes) -> None:
    out = call(function, inputs, **changes)
    expected, bound = call(attend, inputs, **changes)
    assert out.shape == expected.shape
    assert out.dtype == inputs["q"].dtype
    work = torch.float64 if out.dtype == torch.float64 else torch.float32
    allowed = 16 * torch.finfo(work).eps * bound
    if out.dtype != work:
        allowed = allowed + torch.finfo(out.dtype).eps * expected.abs()
    excess = ((out.double() - expected).abs() - allowed).max()
    assert excess <= 0, f"exceeds its bound by {excess}"
