"""Commit a step: lengths, last token, token history, stop flags and counters, in place and without a host read.

A request keeps the emitted tokens up to and including its first stop id, and never more than it has room for. What is
counted is what is committed: drafts after a stop count as drafted, not as accepted.
"""

import torch
from torch import Tensor

from stepgraph.kernels.checks import check_tensors
from stepgraph.kernels.registry import register

RUNNING, STOPPED, LENGTH = 0, 1, 2  # values of `finished`

# Columns of a row of `results` before its tokens: seq_len and finished after the step, drafts there were and drafts that
# were committed, rows of logits that were not finite.
RESULT_HEAD = 5


def check_advance(
    slots: Tensor,
    live: Tensor,
    emitted: Tensor,
    accepted: Tensor,
    num_drafts: Tensor,
    repaired: Tensor,
    seq_len: Tensor,
    last_token: Tensor,
    history: Tensor,
    finished: Tensor,
    steps: Tensor,
    drafted_at: Tensor,
    accepted_at: Tensor,
    repaired_total: Tensor,
    results: Tensor,
    stop_ids: Tensor,
    limit: Tensor,
) -> None:
    """Raise a ValueError where `advance` has no meaning."""
    op, batch, state_rows = "advance", slots.shape[0], seq_len.shape[0]
    check_tensors(op, (batch,), torch.int64, slots=slots, accepted=accepted, num_drafts=num_drafts, repaired=repaired)
    check_tensors(op, (batch,), torch.bool, live=live)
    check_tensors(op, (batch, None), torch.int64, emitted=emitted)
    counters = {"steps": steps, "repaired_total": repaired_total}
    check_tensors(op, (state_rows,), torch.int64, seq_len=seq_len, last_token=last_token, finished=finished, limit=limit)
    check_tensors(op, (state_rows,), torch.int64, **counters)
    check_tensors(op, (state_rows, None), torch.int64, history=history, stop_ids=stop_ids, drafted_at=drafted_at)
    check_tensors(op, tuple(drafted_at.shape), torch.int64, accepted_at=accepted_at)
    check_tensors(op, (None, None), torch.int64, results=results)
    query_len, k_max = emitted.shape[1], drafted_at.shape[1]
    if not 1 <= query_len <= k_max + 1:
        raise ValueError(f"{op}: emitted has {query_len} columns; allowed are 1 to k_max + 1 = {k_max + 1}")
    if results.shape[0] < batch or results.shape[1] < RESULT_HEAD + query_len:
        raise ValueError(
            f"{op}: results is {list(results.shape)}; allowed are [{batch}, {RESULT_HEAD + query_len}] and more of each"
        )


def advance_reference(
    slots: Tensor,
    live: Tensor,
    emitted: Tensor,
    accepted: Tensor,
    num_drafts: Tensor,
    repaired: Tensor,
    seq_len: Tensor,
    last_token: Tensor,
    history: Tensor,
    finished: Tensor,
    steps: Tensor,
    drafted_at: Tensor,
    accepted_at: Tensor,
    repaired_total: Tensor,
    results: Tensor,
    stop_ids: Tensor,
    limit: Tensor,
) -> None:
    """Write the outcome of one step into the state of the live rows' requests.

    Args:
        slots: `[B]` int64, the request of each row; rows that are not live name the null slot, the state's last one.
        live: `[B]` bool.
        emitted: `[B, k+1]` int64, −1 padded.
        accepted, num_drafts, repaired: `[B]` int64, accepted drafts, drafts there were, rows of logits that were not finite.
        seq_len: `[S]` int64, tokens in the KV cache, which is the last token's position; written.
        last_token: `[S]` int64; written.
        history: `[S, max_len]` int64, tokens by position; written.
        finished: `[S]` int64: 0 running, 1 stopped at a stop id, 2 out of room; written.
        steps: `[S]` int64, steps the request took part in; written.
        drafted_at, accepted_at: `[S, k_max]` int64, drafts proposed and accepted by position in the window; written.
        repaired_total: `[S]` int64, sum of `repaired` over the request's steps; written.
        results: `[R ≥ B, 5 + k_max + 1]` int64, what the host reads, by row: seq_len and finished after the step, drafts,
            committed drafts, repaired, then the committed tokens, −1 padded up to column 5 + k; −1 for a row that is not
            live; written up to column 5 + k of the first B rows.
        stop_ids: `[S, n]` int64, −1 padded.
        limit: `[S]` int64, most tokens the request may have, its prompt included.
    """
    query_len, k_max = emitted.shape[1], drafted_at.shape[1]
    column = torch.arange(query_len, device=emitted.device)
    length = seq_len[slots]
    room = limit[slots] - 1 - length

    is_stop = ((emitted[:, :, None] == stop_ids[slots][:, None, :]) & (emitted >= 0)[:, :, None]).any(-1)
    until_stop = torch.where(is_stop, column + 1, query_len + 1).amin(-1)
    count = torch.minimum(torch.minimum(accepted + 1, until_stop), room)
    count = torch.where(live, count.clamp(min=0), 0)
    outcome = torch.where(count == until_stop, STOPPED, torch.where(count >= room, LENGTH, RUNNING))

    # Every write goes to a cell of the row itself or of the null slot, which gets back what it holds.
    kept = (column < count[:, None]) & live[:, None]
    null = history.shape[0] - 1
    at_row = torch.where(kept, slots[:, None], null)
    at_position = torch.where(kept, length[:, None] + 1 + column, 0).clamp(max=history.shape[1] - 1)
    history.index_put_((at_row, at_position), torch.where(kept, emitted, history[null, 0]))

    final = emitted.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    last_token.index_copy_(0, slots, torch.where(count > 0, final, last_token[slots]))
    finished.index_copy_(0, slots, torch.where(live, outcome, finished[slots]))
    seq_len.index_copy_(0, slots, length + count)
    steps.index_add_(0, slots, live.to(steps.dtype))
    draft_column = torch.arange(k_max, device=emitted.device)
    committed = torch.minimum(accepted, count)
    drafted_at.index_add_(0, slots, (live[:, None] & (draft_column < num_drafts[:, None])).to(drafted_at.dtype))
    accepted_at.index_add_(0, slots, (live[:, None] & (draft_column < committed[:, None])).to(accepted_at.dtype))
    repaired_total.index_add_(0, slots, torch.where(live, repaired, 0))
    head = torch.stack([length + count, outcome, num_drafts, committed, repaired], 1)
    rows = torch.cat([head, torch.where(kept, emitted, -1)], 1)
    results[: len(rows), : rows.shape[1]] = torch.where(live[:, None], rows, -1)


advance = register(
    "advance(Tensor slots, Tensor live, Tensor emitted, Tensor accepted, Tensor num_drafts, Tensor repaired, "
    "Tensor(a!) seq_len, Tensor(b!) last_token, Tensor(c!) history, Tensor(d!) finished, Tensor(e!) steps, "
    "Tensor(f!) drafted_at, Tensor(g!) accepted_at, Tensor(h!) repaired_total, Tensor(i!) results, Tensor stop_ids, "
    "Tensor limit) -> ()",
    reference=advance_reference,
    triton="stepgraph.kernels.advance_triton:advance_triton",
    fake=lambda *args: None,
    check=check_advance,
)
