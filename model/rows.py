"""The fixed-shape views through which a forward pass sees the requests of a batch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class QueryRows:
    """Where `B` requests × `Q` query tokens sit, for one forward pass.

    Query i of row b sits at position `seq_lens[b] - Q + i`. `seq_lens` 0 makes a row inert: attention gives zeros, nothing
    is written.

    Attributes:
        positions: `[B, Q]` int64, absolute positions.
        seq_lens: `[B]` int64, tokens attended to by the last query of each row.
        kv_slots: `[B, Q]` int64, flat KV slot (block * block_size + offset) each token's key and value are written to,
            −1 for none.
        block_table: `[B, M]` int64, block ids of each row.
    """

    positions: Tensor
    seq_lens: Tensor
    kv_slots: Tensor
    block_table: Tensor


def query_rows(
    first: Tensor, query_len: int, block_table: Tensor, block_size: int, live: Tensor, writable: Tensor
) -> QueryRows:
    """Rows whose query starts at position `first[b]`.

    Args:
        first: `[B]` int64, position of query 0.
        query_len: Q, the same for every row.
        block_table: `[B, M]` int64.
        block_size: tokens in a block.
        live: `[B]` bool; other rows become inert.
        writable: `[B]` int64; only positions below it may be written (those at or above it hold no token of the request).
    """
    positions = first[:, None] + torch.arange(query_len, device=first.device)
    seq_lens = torch.where(live, first + query_len, 0)
    column = (positions // block_size).clamp(0, block_table.shape[1] - 1)
    slots = block_table.gather(1, column) * block_size + positions % block_size
    written = live[:, None] & (positions >= 0) & (positions < writable[:, None])
    return QueryRows(positions, seq_lens, torch.where(written, slots, -1), block_table)
