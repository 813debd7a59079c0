"""Self-speculation by early exit: the target's first N layers and its head draft for the whole target.

It shares the target's KV cache: drafting writes layers 0..N−1 at the drafted positions, and verification writes the same
positions again with all layers, so there is no state of its own to keep.
"""

import torch
from torch import Tensor

from stepgraph.model.drafters.base import Drafter, Proposal, StepRows, draft_rows
from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.rows import QueryRows
from stepgraph.model.transformer import Transformer


class EarlyExitDrafter(Drafter):
    """The first `num_layers` layers of `target` over the target's own cache `kv`."""

    def __init__(self, target: Transformer, kv: PagedKV, num_layers: int):
        super().__init__()
        depth = target.config.num_layers
        if not 1 <= num_layers <= depth:
            raise ValueError(f"early-exit:{num_layers}; the target has {depth} layers, so 1 to {depth} are possible")
        self.name = f"early-exit:{num_layers}"
        self.num_layers = num_layers
        # In a tuple, so that the target is not registered as a part of the drafter: it is the step's.
        self.shared = (target, kv)

    def propose(self, rows: StepRows, k: int) -> Proposal:
        target, kv = self.shared

        def first_layers(tokens: Tensor, query: QueryRows) -> Tensor:
            return target.logits(target.hidden(tokens, query, kv, self.num_layers)[:, 0])

        tokens, laws = draft_rows(rows, range(k), kv.block_size, rows.last_token, first_layers, self.early_stop)
        return Proposal(torch.stack(tokens, 1), torch.stack(laws, 1))
