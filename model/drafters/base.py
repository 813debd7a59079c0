"""What a drafter is: it proposes k tokens a row in a fixed shape, and is told what was verified."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stepgraph.kernels.philox import Stream
from stepgraph.kernels.sampling import draw, token_law
from stepgraph.kernels.support import CaptureSupport
from stepgraph.model.drafters.early_stop import EarlyStop
from stepgraph.model.rows import QueryRows, query_rows


@dataclass(frozen=True)
class StepRows:
    """The requests of one step, one row each, as the drafters see them. Rows that are not `live` are padding.

    Attributes:
        slots: `[B]` int64, each row's request; padding rows name the state's null slot.
        live: `[B]` bool.
        seq_len: `[B]` int64, tokens in the KV cache, which is the position of `last_token`.
        last_token: `[B]` int64, the newest committed token.
        previous_token: `[B]` int64, the one before it, −1 at the start of a text.
        num_drafts: `[B]` int64 ≤ k, drafts that the row may have in this step.
        block_table: `[B, M]` int64.
        history: `[S, max_len]` int64, tokens by position, of every request.
        temperature, top_k, top_p, min_p, seed: `[B]`, sampling parameters.
    """

    slots: Tensor
    live: Tensor
    seq_len: Tensor
    last_token: Tensor
    previous_token: Tensor
    num_drafts: Tensor
    block_table: Tensor
    history: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor

    def query(self, first: Tensor, query_len: int, block_size: int, *, live: Tensor, writable: Tensor) -> QueryRows:
        """`query_len` tokens a row from position `first`, over the rows' own blocks."""
        return query_rows(first, query_len, self.block_table, block_size, live, writable)


class Proposal(NamedTuple):
    """What a drafter proposes.

    Attributes:
        tokens: `[B, k]` int64 target ids, −1 for "no draft".
        law: `[B, k, V]`, the laws they were drawn from, or None if all are one-hot.
        one_hot: `[B]` bool, rows whose drafts are one-hot although there is a law, or None for no such row.
        d2t: `[D]` int64, target ids of a reduced draft vocabulary; `law` is then `[B, k, D]`.
    """

    tokens: Tensor
    law: Tensor | None
    one_hot: Tensor | None = None
    d2t: Tensor | None = None


class Verified(NamedTuple):
    """What a step verified.

    Attributes:
        tokens: `[B, k+1]` int64, the target's inputs, at positions `seq_len ..`.
        hidden: `[B, k+1, hidden]`, its final hidden states over them.
        features: `[B, k+1, hidden * len(feature_layers)]`, or None for a drafter that asks for none.
        emitted: `[B, k+1]` int64, the tokens at positions `seq_len + 1 ..` that the step commits, then −1.
        accepted: `[B]` int64, accepted drafts; row i of the target is of the committed text for i ≤ accepted.
    """

    tokens: Tensor
    hidden: Tensor
    features: Tensor | None
    emitted: Tensor
    accepted: Tensor


class PromptChunk(NamedTuple):
    """A chunk of C prompt tokens of one request that went through the target.

    Attributes:
        slots: `[1]` int64, the request.
        tokens: `[1, C]` int64.
        next_tokens: `[1, C]` int64, the token after each; the last prompt token is never in a chunk, so there always is one.
        rows: where they sit.
        hidden: `[1, C, hidden]`, the target's final hidden states.
        features: `[1, C, hidden * len(feature_layers)]`, or None for a drafter that asks for none.
    """

    slots: Tensor
    tokens: Tensor
    next_tokens: Tensor
    rows: QueryRows
    hidden: Tensor
    features: Tensor | None


class Drafter(nn.Module):
    """Base of all drafters. Everything here runs inside the captured step: fixed shapes, no host reads.

    Attributes:
        name: as given on the command line.
        max_positions: largest position + 1 at which it can draft, None for no limit of its own.
        capture_support: what its part of the step can be captured for.
        feature_layers: layers of the target whose inputs it wants to see (`Transformer.hidden_and_features`).
        early_stop: when a row stops drafting before k; None never does.
    """

    name: str
    max_positions: int | None = None
    capture_support: CaptureSupport = CaptureSupport.UNIFORM_BATCH
    feature_layers: tuple[int, ...] = ()
    early_stop: EarlyStop | None = None

    def propose(self, rows: StepRows, k: int) -> Proposal:
        """k ≥ 1 proposals for positions `seq_len + 1 ..` of each row; columns from `num_drafts` on may hold anything."""
        raise NotImplementedError

    def observe(self, rows: StepRows, k: int, verified: Verified) -> None:
        """After verification: bring the drafter's own state to every committed position, for any k including 0.

        `rows` are the step's rows as they were before it.
        """

    def prefill(self, chunk: PromptChunk) -> None:
        """A chunk of a prompt went through the target."""


def draft_rows(
    rows: StepRows,
    columns: Iterable[int],
    block_size: int,
    token: Tensor,
    logits_of: Callable[[Tensor, QueryRows], Tensor],
    early_stop: EarlyStop | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Draft autoregressively, one row a column.

    Args:
        rows: the step's rows.
        columns: columns to draft, 0-based, in order.
        block_size: tokens in a KV block.
        token: `[B]` int64, the token before the first of the columns.
        logits_of: runs a model over tokens `[B, 1]` at the given rows and returns logits `[B, V]`.
        early_stop: see `draw_draft`.

    Returns:
        tokens `[B]` and laws `[B, V]` of each column.
    """
    tokens, laws = [], []
    for column in columns:
        drafting = rows.live & (rows.num_drafts > column)
        position = rows.seq_len + column
        query = rows.query(position, 1, block_size, live=drafting, writable=position + 1)
        token, law = draw_draft(logits_of(token[:, None], query), rows, column, early_stop)
        tokens.append(token)
        laws.append(law)
    return tokens, laws


def draw_draft(logits: Tensor, rows: StepRows, column: int, early_stop: EarlyStop | None = None) -> tuple[Tensor, Tensor]:
    """Draw the draft of `column` (0-based) from `logits [B, V]` under each row's sampling parameters.

    Returns:
        tokens `[B]` int64, −1 where `early_stop` wants none, and the law `[B, V]` they were drawn from, which is what the
        acceptance test must use.
    """
    law = token_law(logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    position = rows.seq_len + 1 + column
    token = draw(law, rows.seed, position, rows.seq_len, int(Stream.DRAFT))
    return token if early_stop is None else torch.where(early_stop.keeps(logits), token, -1), law
