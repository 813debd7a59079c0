"""An independent small language model as drafter, with a paged KV cache of its own behind the target's block tables.

When all k drafts of a step are accepted, the last one was never an input of the draft model. So its first pass always takes
two tokens, the last two committed ones: one row catches up (or repeats a row with the same result), the other drafts.
"""

from dataclasses import replace

import torch
from torch import Tensor

from stepgraph.model.drafters.base import Drafter, PromptChunk, Proposal, StepRows, Verified, draft_rows, draw_draft
from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.rows import QueryRows
from stepgraph.model.transformer import Transformer


class DraftModelDrafter(Drafter):
    """`model` drafts over its own cache `kv`, which has as many blocks of the same size as the target's."""

    def __init__(self, model: Transformer, kv: PagedKV, name: str):
        super().__init__()
        self.name = f"draft-model:{name}"
        self.model, self.kv = model, kv
        self.max_positions: int = model.max_positions

    def propose(self, rows: StepRows, k: int) -> Proposal:
        def one_row(tokens: Tensor, query: QueryRows) -> Tensor:
            return self.model.logits(self.model.hidden(tokens, query, self.kv)[:, 0])

        token, law = draw_draft(self.model.logits(self._catch_up(rows)[:, 1]), rows, 0, self.early_stop)
        tokens, laws = draft_rows(rows, range(1, k), self.kv.block_size, token, one_row, self.early_stop)
        return Proposal(torch.stack([token, *tokens], 1), torch.stack([law, *laws], 1))

    def observe(self, rows: StepRows, k: int, verified: Verified) -> None:
        # A step with k ≥ 1 took its inputs in `propose`; a step without drafts has only this.
        if k == 0:
            self._catch_up(rows)

    def prefill(self, chunk: PromptChunk) -> None:
        rows = chunk.rows
        inside = torch.where(rows.positions < self.max_positions, rows.kv_slots, -1)
        self.model.hidden(chunk.tokens, replace(rows, kv_slots=inside), self.kv)

    def _catch_up(self, rows: StepRows) -> Tensor:
        """Hidden states `[B, 2, hidden]` of the last two committed tokens."""
        last_two = torch.stack([rows.previous_token, rows.last_token], 1)
        within = torch.clamp(rows.seq_len + 1, max=self.max_positions)
        query = rows.query(rows.seq_len - 1, 2, self.kv.block_size, live=rows.live, writable=within)
        return self.model.hidden(last_two, query, self.kv)
