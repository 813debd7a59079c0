"""The speculative-decoding step: draft, verify, accept, observe, advance. This file is what one graph holds."""

import torch
from torch import nn

from stepgraph.capture.phases import phase
from stepgraph.capture.state import DecodeState
from stepgraph.capture.transfer import integers
from stepgraph.kernels.advance import advance
from stepgraph.kernels.logprobs import record_logprobs
from stepgraph.kernels.rejection import rejection_sample
from stepgraph.kernels.transforms import transform_logits
from stepgraph.model.drafters.base import Drafter, PromptChunk, Proposal, StepRows, Verified
from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.rows import query_rows
from stepgraph.model.transformer import Transformer


class SpeculativeStep(nn.Module):
    """One whole step over the first `batch` rows of the state, with k drafts a row.

    All effects are in `state`, `kv` and the drafter's own buffers; there is nothing to return and nothing to read on the
    host. A module, so that a trace can name and replace every tensor it touches.
    """

    def __init__(self, target: Transformer, kv: PagedKV, state: DecodeState, drafter: Drafter | None = None):
        super().__init__()
        if state.block_table.shape[1] * kv.block_size < state.max_len:
            raise ValueError(f"block tables of {state.block_table.shape[1]} blocks hold less than max_len={state.max_len}")
        if state.max_len > target.max_positions:
            raise ValueError(f"max_len is {state.max_len}; the target has positions for {target.max_positions} tokens")
        self.target, self.kv, self.state, self.drafter = target, kv, state, drafter
        self.feature_layers = drafter.feature_layers if drafter is not None else ()

    def forward(self, batch: int, k: int) -> None:
        state = self.state
        with phase("draft"):
            rows = state.rows(batch, k, self.drafter.max_positions if self.drafter else None)
            drafts = self.draft(rows, k)
            num_drafts = (drafts.tokens >= 0).sum(1)

        with phase("verify"):
            # The query is [last token, d_1 .. d_k] at positions seq_len .. seq_len + k; only real tokens enter the cache.
            tokens = torch.cat([rows.last_token[:, None], drafts.tokens], 1)
            written = rows.seq_len + num_drafts + 1
            query = rows.query(rows.seq_len, k + 1, self.kv.block_size, live=rows.live, writable=written)
            hidden, features = self.target.hidden_and_features(tokens, query, self.kv, self.feature_layers)
            logits = self.target.logits(hidden)

        with phase("accept"):
            slots = rows.slots
            transform_logits(
                logits, drafts.tokens, slots, rows.seq_len, state.history, state.transformed, state.prompt_len, state.min_len,
                state.repetition, state.frequency, state.presence, state.bias_ids, state.bias_values, state.stop_ids,
            )  # fmt: skip
            sampling = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed)
            emitted, accepted, repaired = rejection_sample(
                logits, drafts.tokens, drafts.law, *sampling, rows.seq_len, state.verify[slots], state.rates[slots],
                drafts.one_hot, drafts.d2t,
            )  # fmt: skip

        if self.drafter is not None:
            with phase("observe"):
                self.drafter.observe(rows, k, Verified(tokens, hidden, features, emitted, accepted))

        with phase("advance"):
            advance(
                slots, rows.live, emitted, accepted, num_drafts, repaired, state.seq_len, state.last_token, state.history,
                state.finished, state.steps, state.drafted_at, state.accepted_at, state.repaired, state.results,
                state.stop_ids, state.limit,
            )  # fmt: skip
            record_logprobs(logits, emitted, slots, rows.seq_len, state.wants_logprobs, state.seq_len, state.logprobs)

    def draft(self, rows: StepRows, k: int) -> Proposal:
        """Proposals with −1 in the columns that a row may not use, and in all columns from its first −1 on."""
        if k == 0:
            return Proposal(rows.last_token.new_empty((rows.last_token.shape[0], 0)), None)
        if self.drafter is None:
            raise ValueError(f"k={k} needs a drafter; this step has none")
        proposal = self.drafter.propose(rows, k)
        tokens = proposal.tokens
        allowed = torch.arange(k, device=tokens.device) < rows.num_drafts[:, None]
        usable = (allowed & (tokens >= 0)).to(torch.int64).cumprod(1) > 0
        return proposal._replace(tokens=torch.where(usable, tokens, -1))

    def prefill(self, slot: int, tokens: list[int], start: int) -> None:
        """Run a chunk of a prompt, `tokens` at positions `start ..`, through target and drafter. Not captured.

        The state's history has to hold the token after the chunk already: the drafter may look one ahead.
        """
        device, stop = self.state.slots.device, start + len(tokens)
        slots, first, end = integers([[slot], [start], [stop]], device)
        live = torch.ones(1, dtype=torch.bool, device=device)
        rows = query_rows(first, len(tokens), self.state.block_table[slot][None], self.kv.block_size, live, end)
        chunk = integers([tokens], device)
        hidden, features = self.target.hidden_and_features(chunk, rows, self.kv, self.feature_layers)
        if self.drafter is not None:
            next_tokens = self.state.history[slot, start + 1 : stop + 1][None]
            self.drafter.prefill(PromptChunk(slots, chunk, next_tokens, rows, hidden, features))
