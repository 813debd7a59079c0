"""What changes a row's logits before its law is taken: logit bias, penalties, and stop ids that may not come yet.

For row i of a window, which follows drafts d_1 .. d_i, in this order (the second is from Keskar et al. 2019):

    l(t) += bias(t)
    l(t)  = l(t) / r where l(t) > 0, else l(t) r        for t in the text so far, drafts d_1 .. d_i included
    l(t) -= frequency n(t) + presence [n(t) > 0]        n(t): occurrences in the answer so far, d_1 .. d_i included
    l(t)  = −inf                                        for stop ids, while the text has fewer than min_len tokens

The occurrences are counted anew in each step from the token history, and only for requests that ask for it. Counts kept
between steps would be a [slots, V] tensor (39 MB for 64 slots and 152,000 tokens) that has to be wound back after every
rejection; the history is there anyway, and right by construction.
"""

import torch
from torch import Tensor

from stepgraph.kernels.checks import check_tensor, check_tensors
from stepgraph.kernels.dtypes import accumulation_dtype
from stepgraph.kernels.registry import register


def check_transform_logits(
    logits: Tensor,
    draft_tokens: Tensor,
    slots: Tensor,
    base: Tensor,
    history: Tensor,
    transformed: Tensor,
    prompt_len: Tensor,
    min_len: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    stop_ids: Tensor,
) -> None:
    """Raise a ValueError where `transform_logits` has no meaning."""
    op = "transform_logits"
    check_tensor(op, "logits", logits, (None, None, None))
    batch, query_len, _ = logits.shape
    check_tensor(op, "history", history, (None, None), torch.int64)
    state_rows = history.shape[0]
    check_tensors(op, (batch, query_len - 1), torch.int64, draft_tokens=draft_tokens)
    check_tensors(op, (batch,), torch.int64, slots=slots, base=base)
    check_tensors(op, (state_rows,), torch.bool, transformed=transformed)
    check_tensors(op, (state_rows,), torch.int64, prompt_len=prompt_len, min_len=min_len)
    check_tensors(op, (state_rows,), torch.float32, repetition=repetition, frequency=frequency, presence=presence)
    check_tensors(op, (state_rows, None), torch.int64, bias_ids=bias_ids, stop_ids=stop_ids)
    check_tensors(op, tuple(bias_ids.shape), torch.float32, bias_values=bias_values)


def transform_logits_reference(
    logits: Tensor,
    draft_tokens: Tensor,
    slots: Tensor,
    base: Tensor,
    history: Tensor,
    transformed: Tensor,
    prompt_len: Tensor,
    min_len: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    bias_ids: Tensor,
    bias_values: Tensor,
    stop_ids: Tensor,
) -> None:
    """Transform the logits of rows whose request asks for it, in place; others keep their bytes.

    Args:
        logits: `[B, k+1, V]`; written.
        draft_tokens: `[B, k]` int64, −1 for "no draft"; ids outside the vocabulary count as that.
        slots: `[B]` int64, each row's request.
        base: `[B]` int64, position of the last committed token; row i decides about position base + 1 + i.
        history: `[S, max_len]` int64, tokens by position.
        transformed: `[S]` bool, requests with anything to do.
        prompt_len: `[S]` int64; tokens from this position on are the answer.
        min_len: `[S]` int64; no stop id at positions below it.
        repetition, frequency, presence: `[S]` float32; 1, 0, 0 change nothing.
        bias_ids, bias_values: `[S, n]` int64, −1 padded, each id once, and float32.
        stop_ids: `[S, m]` int64, −1 padded. Ids outside the vocabulary change nothing, here and in bias_ids.
    """
    batch, query_len, vocab = logits.shape
    dtype, device = accumulation_dtype(logits.dtype), logits.device
    at = torch.arange(history.shape[1], device=device)
    text, committed = history[slots], at <= base[:, None]
    answer = committed & (at >= prompt_len[slots][:, None])

    def counts(tokens: Tensor, of: Tensor) -> Tensor:
        # Positions that do not count add 0 to token 0.
        zero = torch.zeros(batch, vocab, dtype=torch.int32, device=device)
        return zero.scatter_add(-1, torch.where(of, tokens, 0), of.to(torch.int32))

    seen, said = [counts(text, committed)], [counts(text, answer)]
    drafted = ((draft_tokens >= 0) & (draft_tokens < vocab)).to(torch.int64).cumprod(-1) > 0
    for column in range(query_len - 1):
        one = counts(draft_tokens[:, column : column + 1], drafted[:, column : column + 1])
        seen.append(seen[-1] + one)
        said.append(said[-1] + one)
    seen, said = torch.stack(seen, 1), torch.stack(said, 1)

    def of_slot(values: Tensor) -> Tensor:
        return values[slots][:, None, None].to(dtype)

    def at_ids(ids: Tensor, values: Tensor) -> Tensor:
        # Padding, and ids that the vocabulary does not have, land in a column that is cut off.
        spread = torch.zeros(batch, vocab + 1, dtype=dtype, device=device)
        return spread.scatter_add(-1, torch.where((ids >= 0) & (ids < vocab), ids, vocab), values)[:, None, :vocab]

    new = logits.to(dtype) + at_ids(bias_ids[slots], bias_values[slots].to(dtype))
    penalty = of_slot(repetition)
    new = torch.where(seen > 0, torch.where(new > 0, new / penalty, new * penalty), new)
    new = new - of_slot(frequency) * said - torch.where(said > 0, of_slot(presence), 0.0)
    stops = stop_ids[slots]
    is_stop = at_ids(stops, torch.ones_like(stops, dtype=dtype)) > 0
    position = base[:, None] + 1 + torch.arange(query_len, device=device)
    too_early = position < min_len[slots][:, None]
    new = torch.where(is_stop & too_early[..., None], -torch.inf, new)
    logits.copy_(torch.where(transformed[slots][:, None, None], new.to(logits.dtype), logits))


def transform_logits_cpu(logits, draft_tokens, slots, base, history, transformed, *parameters) -> None:
    """Same contract; rows with nothing to do cost nothing."""
    rows = transformed[slots].nonzero().flatten()
    if len(rows) == 0:
        return
    some = logits[rows]
    transform_logits_reference(some, draft_tokens[rows], slots[rows], base[rows], history, transformed, *parameters)
    logits[rows] = some


transform_logits = register(
    "transform_logits(Tensor(a!) logits, Tensor draft_tokens, Tensor slots, Tensor base, Tensor history, Tensor transformed, "
    "Tensor prompt_len, Tensor min_len, Tensor repetition, Tensor frequency, Tensor presence, Tensor bias_ids, "
    "Tensor bias_values, Tensor stop_ids) -> ()",
    reference=transform_logits_reference,
    cpu=transform_logits_cpu,
    triton="stepgraph.kernels.transforms_triton:transform_logits_triton",
    fake=lambda *args: None,
    check=check_transform_logits,
)
