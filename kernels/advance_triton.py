"""Triton commit of a step, one program per row; contract in `stepgraph.kernels.advance`."""

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.kernels.advance import check_advance
from stepgraph.kernels.launch import LaunchSpec, launch


@triton.jit(do_not_specialize=["num_stops", "history_stride", "results_stride"])
def advance_kernel(
    slots_ptr,  # [B]
    live_ptr,  # [B] bool
    emitted_ptr,  # [B, QUERY_LEN]
    accepted_ptr,  # [B]
    num_drafts_ptr,  # [B]
    repaired_ptr,  # [B]
    seq_len_ptr,  # [S], as everything below
    last_token_ptr,
    history_ptr,  # [S, max_len]
    finished_ptr,
    steps_ptr,
    drafted_at_ptr,  # [S, K_MAX]
    accepted_at_ptr,
    repaired_total_ptr,
    results_ptr,  # [R, results_stride]
    stop_ids_ptr,  # [S, num_stops]
    limit_ptr,
    num_stops,
    history_stride,
    results_stride,
    QUERY_LEN: tl.constexpr,
    QUERY_PAD: tl.constexpr,
    K_MAX: tl.constexpr,
    K_PAD: tl.constexpr,
    STOP_PAD: tl.constexpr,
):
    """A row that is not live writes its result only. Each live row has a slot of its own, so that no two programs meet."""
    row = tl.program_id(0).to(tl.int64)
    result_ptr = results_ptr + row * results_stride
    head = tl.arange(0, 8)  # RESULT_HEAD columns
    column = tl.arange(0, QUERY_PAD)
    if tl.load(live_ptr + row).to(tl.int32) == 0:
        tl.store(result_ptr + head, tl.full([8], -1, tl.int64), mask=head < 5)
        tl.store(result_ptr + 5 + column, tl.full([QUERY_PAD], -1, tl.int64), mask=column < QUERY_LEN)
    if tl.load(live_ptr + row).to(tl.int32) != 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        accepted = tl.load(accepted_ptr + row)
        length = tl.load(seq_len_ptr + slot)
        room = tl.load(limit_ptr + slot) - 1 - length

        emitted = tl.load(emitted_ptr + row * QUERY_LEN + column, mask=column < QUERY_LEN, other=-1)  # [QUERY_PAD]
        index = tl.arange(0, STOP_PAD)
        stop_ids = tl.load(stop_ids_ptr + slot * num_stops + index, mask=index < num_stops, other=-1)  # [STOP_PAD]
        hits = ((emitted[:, None] == stop_ids[None, :]) & (emitted >= 0)[:, None]).to(tl.int32)
        until_stop = tl.min(tl.where(tl.max(hits, axis=1) > 0, column + 1, QUERY_LEN + 1), axis=0)
        count = tl.maximum(tl.minimum(tl.minimum(accepted + 1, until_stop), room), 0)

        kept = column < count
        position = tl.minimum(length + 1 + column, history_stride - 1)
        tl.store(history_ptr + slot * history_stride + position, emitted, mask=kept)
        final = tl.sum(tl.where(column == count - 1, emitted, 0), axis=0)
        old_last = tl.load(last_token_ptr + slot)
        tl.store(last_token_ptr + slot, tl.where(count > 0, final, old_last))
        # RUNNING 0, STOPPED 1, LENGTH 2
        outcome = tl.where(count == until_stop, 1, tl.where(count >= room, 2, 0))
        tl.store(finished_ptr + slot, outcome.to(finished_ptr.dtype.element_ty))
        tl.store(seq_len_ptr + slot, length + count)
        tl.store(steps_ptr + slot, tl.load(steps_ptr + slot) + 1)

        draft = tl.arange(0, K_PAD)
        inside = draft < K_MAX
        num_drafts = tl.load(num_drafts_ptr + row)
        drafted_ptr = drafted_at_ptr + slot * K_MAX + draft
        drafted = tl.load(drafted_ptr, mask=inside, other=0)  # [K_PAD]
        tl.store(drafted_ptr, drafted + (draft < num_drafts).to(drafted.dtype), mask=inside)
        committed_ptr = accepted_at_ptr + slot * K_MAX + draft
        committed = tl.load(committed_ptr, mask=inside, other=0)  # [K_PAD]
        tl.store(committed_ptr, committed + (draft < tl.minimum(accepted, count)).to(committed.dtype), mask=inside)

        repaired = tl.load(repaired_ptr + row)
        tl.store(repaired_total_ptr + slot, tl.load(repaired_total_ptr + slot) + repaired)
        kept_drafts = tl.minimum(accepted, count)
        summary = tl.where(head == 0, length + count, tl.where(head == 1, outcome.to(tl.int64), num_drafts))
        summary = tl.where(head == 3, kept_drafts, tl.where(head == 4, repaired, summary))
        tl.store(result_ptr + head, summary, mask=head < 5)
        tl.store(result_ptr + 5 + column, tl.where(kept, emitted, -1), mask=column < QUERY_LEN)


def advance_triton(
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
    """Same contract as `advance_reference`."""
    check_advance(
        slots, live, emitted, accepted, num_drafts, repaired, seq_len, last_token, history,
        finished, steps, drafted_at, accepted_at, repaired_total, results, stop_ids, limit,
    )  # fmt: skip
    written = {
        "seq_len": seq_len,
        "last_token": last_token,
        "history": history,
        "finished": finished,
        "steps": steps,
        "drafted_at": drafted_at,
        "accepted_at": accepted_at,
        "repaired_total": repaired_total,
        "results": results,
    }
    for name, tensor in written.items():
        if not tensor.is_contiguous():
            raise ValueError(f"advance: {name} must be contiguous; strides are {tensor.stride()}")
    read = {
        "slots": slots,
        "live": live,
        "emitted": emitted,
        "accepted": accepted,
        "num_drafts": num_drafts,
        "repaired": repaired,
        "stop_ids": stop_ids,
        "limit": limit,
    }
    query_len, k_max = emitted.shape[1], drafted_at.shape[1]
    # One program per row.
    launch(
        LaunchSpec(
            kernel=advance_kernel,
            grid=(slots.shape[0],),
            args={
                **{f"{name}_ptr": tensor for name, tensor in written.items()},
                **{f"{name}_ptr": tensor.contiguous() for name, tensor in read.items()},
                "num_stops": stop_ids.shape[1],
                "history_stride": history.shape[1],
                "results_stride": results.shape[1],
            },
            constexprs={
                "QUERY_LEN": query_len,
                "QUERY_PAD": triton.next_power_of_2(query_len),
                "K_MAX": k_max,
                "K_PAD": max(1, triton.next_power_of_2(k_max)),
                "STOP_PAD": max(1, triton.next_power_of_2(stop_ids.shape[1])),
            },
            num_warps=1,
        )
    )
