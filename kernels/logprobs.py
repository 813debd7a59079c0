"""Log-probabilities of emitted tokens, each under its own row.

They are those of the law at temperature 1 before top-k, top-p and min-p, and after bias and penalties: how likely the model,
as the request steers it, found the token.
"""

import torch
from torch import Tensor

from stepgraph.kernels.checks import check_tensor, check_tensors
from stepgraph.kernels.dtypes import accumulation_dtype
from stepgraph.kernels.registry import register
from stepgraph.kernels.sampling import finite_logits


def check_record_logprobs(
    logits: Tensor, emitted: Tensor, slots: Tensor, base: Tensor, wanted: Tensor, seq_len: Tensor, logprobs: Tensor
) -> None:
    """Raise a ValueError where `record_logprobs` has no meaning."""
    op = "record_logprobs"
    check_tensor(op, "logits", logits, (None, None, None))
    check_tensors(op, tuple(logits.shape[:2]), torch.int64, emitted=emitted)
    check_tensors(op, (logits.shape[0],), torch.int64, slots=slots, base=base)
    check_tensors(op, (None, None), torch.float32, logprobs=logprobs)
    check_tensors(op, (logprobs.shape[0],), torch.int64, seq_len=seq_len)
    check_tensors(op, (logprobs.shape[0],), torch.bool, wanted=wanted)


def record_logprobs_reference(
    logits: Tensor, emitted: Tensor, slots: Tensor, base: Tensor, wanted: Tensor, seq_len: Tensor, logprobs: Tensor
) -> None:
    """Write the log-probability of each committed token at the token's position, for requests that want them.

    Args:
        logits: `[B, k+1, V]`.
        emitted: `[B, k+1]` int64, −1 padded.
        slots: `[B]` int64, each row's request; rows that are not live name the last slot.
        base: `[B]` int64, position of the last token committed before the step.
        wanted: `[S]` bool; never set for the last slot.
        seq_len: `[S]` int64, after the step's commit: positions base + 1 .. seq_len are new.
        logprobs: `[S, max_len]` float32; written.
    """
    wide = finite_logits(logits.to(accumulation_dtype(logits.dtype)))
    values = wide.log_softmax(-1).gather(-1, emitted.clamp(min=0)[..., None])[..., 0].to(logprobs.dtype)
    position = base[:, None] + 1 + torch.arange(emitted.shape[1], device=logits.device)
    kept = wanted[slots][:, None] & (position <= seq_len[slots][:, None])
    # Every write goes to a cell of the row itself or of the null slot, which gets back what it holds.
    null = logprobs.shape[0] - 1
    at_row, at_position = torch.where(kept, slots[:, None], null), torch.where(kept, position, 0)
    logprobs.index_put_((at_row, at_position), torch.where(kept, values, logprobs[null, 0]))


def record_logprobs_cpu(logits, emitted, slots, base, wanted, seq_len, logprobs) -> None:
    """Same contract; rows that want nothing cost nothing."""
    rows = wanted[slots].nonzero().flatten()
    if len(rows):
        record_logprobs_reference(logits[rows], emitted[rows], slots[rows], base[rows], wanted, seq_len, logprobs)


record_logprobs = register(
    "record_logprobs(Tensor logits, Tensor emitted, Tensor slots, Tensor base, Tensor wanted, Tensor seq_len, "
    "Tensor(a!) logprobs) -> ()",
    reference=record_logprobs_reference,
    cpu=record_logprobs_cpu,
    triton="stepgraph.kernels.logprobs_triton:record_logprobs_triton",
    fake=lambda *args: None,
    check=check_record_logprobs,
)
