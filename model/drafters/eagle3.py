"""EAGLE-3 as a drafter: the head runs over the verified rows in `observe`, and drafts from what it found there.

When a step begins, the head has seen every row up to the one before the last committed token (row L − 1 takes the feature of
position L − 1 and the token at L), and its output there is kept in `feature`, by slot. The first proposal needs no more than
the output matrix; each further one runs a single row on the head's own feature. Those rows write cache positions from L on,
and `observe` writes them again from the target's features, so the cache depends on the committed text alone.
"""

from dataclasses import replace

import torch
from torch import Tensor

from stepgraph.model.drafters.base import Drafter, PromptChunk, Proposal, StepRows, Verified, draw_draft
from stepgraph.model.eagle3_head import Eagle3Head
from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.transformer import Transformer


class Eagle3Drafter(Drafter):
    """`head` drafts for `target` over its own cache `kv`, which has as many blocks of the same size as the target's.

    Args:
        head: its weights, in the target's dtype and on its device.
        target: lends its token embeddings to a head without any.
        kv: of one layer.
        num_slots: requests that the state can hold; there is one more slot, for padding.
        name: as given on the command line.

    Buffers: `feature [num_slots + 1, hidden]`, the head's output of each request's newest row. It means something once the
    request has a token in the cache; a text of one token has no features yet, and its first step drafts nothing.
    """

    def __init__(self, head: Eagle3Head, target: Transformer, kv: PagedKV, num_slots: int, name: str):
        super().__init__()
        self.name = name
        self.head, self.kv = head, kv
        self.feature_layers = head.eagle.feature_layers
        self.max_positions: int = head.max_positions
        # In a tuple, so that the target is not registered as a part of the drafter: it is the step's.
        self.shared = (target,)
        feature = torch.zeros(num_slots + 1, head.config.hidden_size, dtype=head.dtype, device=head.device)
        self.register_buffer("feature", feature, persistent=False)

    @property
    def embed(self) -> Tensor:
        """Token embeddings `[V, hidden]`: the head's own, or the target's."""
        return self.shared[0].embed if self.head.embed is None else self.head.embed

    def propose(self, rows: StepRows, k: int) -> Proposal:
        head, feature = self.head, self.feature[rows.slots]
        drafted, law = draw_draft(head.logits(feature), rows, 0, self.early_stop)
        tokens, laws = [torch.where(rows.seq_len > 0, self._target_ids(drafted), -1)], [law]
        for column in range(1, k):
            position = rows.seq_len + column - 1
            live = rows.live & (rows.num_drafts > column)
            query = rows.query(position, 1, self.kv.block_size, live=live, writable=position + 1)
            feature = head(tokens[-1][:, None], feature[:, None], query, self.kv, self.embed)[:, 0]
            drafted, law = draw_draft(head.logits(feature), rows, column, self.early_stop)
            tokens.append(self._target_ids(drafted))
            laws.append(law)
        return Proposal(torch.stack(tokens, 1), torch.stack(laws, 1), d2t=head.target_ids if head.eagle.reduced else None)

    def _target_ids(self, drafted: Tensor) -> Tensor:
        """Target ids of draft ids; −1, "no draft", stays what it is."""
        ids = self.head.target_ids[drafted.clamp(min=0)]
        return ids if self.early_stop is None else torch.where(drafted < 0, -1, ids)

    def observe(self, rows: StepRows, k: int, verified: Verified) -> None:
        committed = (rows.seq_len + verified.accepted + 1).clamp(max=self.max_positions)
        query = rows.query(rows.seq_len, k + 1, self.kv.block_size, live=rows.live, writable=committed)
        feature = self.head(verified.emitted, self.head.fuse(verified.features), query, self.kv, self.embed)
        newest = verified.accepted[:, None, None].expand(-1, 1, feature.shape[-1])
        self._keep(rows.slots, rows.live, feature.gather(1, newest)[:, 0])

    def prefill(self, chunk: PromptChunk) -> None:
        inside = torch.where(chunk.rows.positions < self.max_positions, chunk.rows.kv_slots, -1)
        rows = replace(chunk.rows, kv_slots=inside)
        feature = self.head(chunk.next_tokens, self.head.fuse(chunk.features), rows, self.kv, self.embed)
        self._keep(chunk.slots, torch.ones_like(chunk.slots, dtype=torch.bool), feature[:, -1])

    def _keep(self, slots: Tensor, live: Tensor, feature: Tensor) -> None:
        """Keep `feature [B, hidden]` by slot. Padding rows write back what the null slot holds."""
        self.feature.index_copy_(0, slots, torch.where(live[:, None], feature, self.feature[slots]))
