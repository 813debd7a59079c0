"""The work list of split-KV attention: which (row, split) pairs of a batch hold keys that some query may see.

It is built on the device from the lengths, once per step and window, and shared by all layers. Splits lie at fixed absolute
positions, `[s · SPLIT, (s + 1) · SPLIT)`, so that a row's partial results do not depend on its neighbours or on Q.

Layout, int32: `[entries, wanted, offset of row 0 … B−1, (row, split) of entry 0, …]`. A row's entries are consecutive, in
split order, from its offset. `wanted` is the number of entries the lengths ask for. Rows that do not fit the capacity get
offset −1 and no entries, and attention answers them with NaN: never a write past the scratch, never a wrong number.
"""

import torch
from torch import Tensor

from stepgraph.kernels.checks import INDEX, check_tensor
from stepgraph.kernels.registry import register

SPLIT = 512  # tokens; decides bits, hence a constant
HEADER = 2  # entries, wanted


def work_capacity(batch: int, table_tokens: int, pool_tokens: int, split: int = SPLIT) -> int:
    """Most (row, split) entries a batch can have: full tables, or a full pool of blocks of which no two rows share one."""
    return min(batch * -(-table_tokens // split), -(-pool_tokens // split) + batch)


def check_work(seq_lens: Tensor, query_len: int, window: int, table_tokens: int, pool_tokens: int, split: int = SPLIT) -> None:
    """Raise a ValueError where `build_attention_work` has no meaning."""
    check_tensor("build_attention_work", "seq_lens", seq_lens, (None,), INDEX)
    for name, value in (("table_tokens", table_tokens), ("pool_tokens", pool_tokens)):
        if value < 0:
            raise ValueError(f"build_attention_work: {name} is {value}; allowed is 0 or more")


def work_size(batch: int, capacity: int) -> int:
    """int32 elements of a work list."""
    return HEADER + batch + 2 * capacity


def build_attention_work_reference(
    seq_lens: Tensor, query_len: int, window: int, table_tokens: int, pool_tokens: int, split: int = SPLIT
) -> Tensor:
    """The work list of one batch.

    Args:
        seq_lens: `[B]`, int64 or int32.
        query_len: Q.
        window: sliding window in tokens, 0 for none.
        table_tokens: tokens a row's block table can name, `M * block_size`; longer rows are cut there.
        pool_tokens: tokens the cache holds, `blocks * block_size`.
        split: tokens per split.

    Returns:
        `[2 + B + 2 capacity]` int32; entries beyond the count are zero here and undefined in general.
    """
    batch = seq_lens.shape[0]
    capacity = work_capacity(batch, table_tokens, pool_tokens, split)
    seq_lens = seq_lens.to(torch.int64)
    first, count = split_range(seq_lens, query_len, window, table_tokens, split)
    end = count.cumsum(0)
    fits = end <= capacity
    entries = (count * fits).sum(0, keepdim=True)

    index = torch.arange(capacity, device=seq_lens.device)
    row = torch.searchsorted(end, index, right=True).clamp(max=batch - 1)
    listed = index < entries
    pairs = torch.stack([row, first[row] + index - (end - count)[row]], dim=-1)
    pairs = torch.where(listed[:, None], pairs, 0)
    header = [entries, count.sum(0, keepdim=True), torch.where(fits, end - count, -1)]
    return torch.cat([*header, pairs.flatten()]).to(torch.int32)


def split_range(seq_lens: Tensor, query_len: int, window: int, table_tokens: int, split: int) -> tuple[Tensor, Tensor]:
    """First split that some query of each row sees, and how many; `[B]` each."""
    stop = seq_lens.clamp(max=table_tokens)
    start = (seq_lens - query_len - window + 1).clamp(min=0) if window > 0 else torch.zeros_like(seq_lens)
    first = start // split
    return first, ((stop + split - 1) // split - first).clamp(min=0)


def build_attention_work_cpu(seq_lens: Tensor, query_len: int, window: int, table_tokens: int, pool_tokens: int) -> Tensor:
    """A list that places no row: attention on the CPU reads lengths on the host and no list. A kernel that is given this one
    answers with NaN, as for any row without entries.
    """
    batch = seq_lens.shape[0]
    work = seq_lens.new_zeros(work_size(batch, work_capacity(batch, table_tokens, pool_tokens)), dtype=torch.int32)
    work[HEADER : HEADER + batch] = -1
    return work


def _fake(seq_lens, query_len, window, table_tokens, pool_tokens):
    batch = seq_lens.shape[0]
    return seq_lens.new_empty(work_size(batch, work_capacity(batch, table_tokens, pool_tokens)), dtype=torch.int32)


build_attention_work = register(
    "build_attention_work(Tensor seq_lens, int query_len, int window, int table_tokens, int pool_tokens) -> Tensor",
    reference=build_attention_work_reference,
    cpu=build_attention_work_cpu,
    triton="stepgraph.kernels.attention.work_triton:build_attention_work_triton",
    fake=_fake,
    check=check_work,
)
