"""The law of what captured steps emit, over a thousand replays of one graph, for each kind of drafter and both methods.

Requests with standard and with block verification share the batch, so that one graph serves both, as the engine runs them.
"""

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from worlds import place, tiny_model, tiny_step

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.kernels.rejection import Verify
from stepgraph.kernels.rejection.law import chi_square
from stepgraph.model.drafters import DraftModelDrafter, EarlyStop
from stepgraph.model.kv_cache import PagedKV

VOCAB, SLOTS, REPLAYS, K = 4, 8, 1000, 2
PROMPT = [1, 2, 3, 1, 2]


def two_tokens(model) -> np.ndarray:
    """`[V, V]`: the target's joint law of the two tokens after the prompt, from plain forward passes."""
    law = np.zeros((VOCAB, VOCAB))
    for first in range(VOCAB):
        step = tiny_step("none", model=model, num_slots=1)
        place(step, 0, [*PROMPT, first])
        rows = step.state
        rows.set_rows([0])
        with torch.no_grad():
            query = rows.rows(1, 0, None)
            spans = [(len(PROMPT) - 1, PROMPT[-1]), (len(PROMPT), first)]
            laws = []
            for position, token in spans:
                at = torch.tensor([position])
                inputs = query.query(at, 1, step.kv.block_size, live=query.live, writable=at + 1)
                hidden = step.target.hidden(torch.tensor([[token]]), inputs, step.kv)
                laws.append(step.target.logits(hidden)[0, 0].softmax(-1).numpy())
        law[first] = laws[0][first] * laws[1]
    return law


class SecondDraftStops(EarlyStop):
    """Keeps the first draft, and the second where its law is sure enough: after some first drafts, not after others."""

    def __init__(self, step):
        state, sure = step.state, set()
        state.set_rows(list(range(SLOTS)))
        for sample in range(40):
            state.seed[:SLOTS] = torch.arange(SLOTS) + sample * SLOTS
            with torch.no_grad():
                laws = step.drafter.propose(state.rows(SLOTS, K, step.drafter.max_positions), K).law
            sure |= set(laws[:, 1].amax(-1).tolist())
        super().__init__("confidence", (min(sure) + max(sure)) / 2)
        object.__setattr__(self, "asked", 0)

    def keeps(self, logits):
        object.__setattr__(self, "asked", self.asked + 1)
        return super().keeps(logits) | (self.asked % K == 1)


def with_draft_model(step, model) -> None:
    """Give the step a draft model, one of another seed with the same tiny vocabulary."""
    own = PagedKV(model.config, num_blocks=step.kv.num_blocks, block_size=step.kv.block_size, dtype=model.dtype)
    step.drafter = DraftModelDrafter(model, own, "tiny")


DRAFTERS = ("ngram", "early-exit:1", "draft-model", "eagle3:tiny", "hybrid:2:eagle3:tiny")


@pytest.mark.parametrize("drafter", [*DRAFTERS, "early-exit:1 stops", "eagle3:tiny stops"])
def test_law_across_replays(drafter):
    """Cases 1, 2, 4 and 10 through whole steps: one-hot drafts, a drafter inside the target, a drafter beside it, one
    with a reduced vocabulary, and one whose rows are one-hot or not as the text has it; and two whose rows
    stop drafting by what was drafted before, so that blocks differ in length.
    """
    drafter, _, stops = drafter.partition(" ")
    layers = 2 if drafter.startswith(("early-exit", "eagle3", "hybrid")) else 1
    model = tiny_model(5, vocab_size=VOCAB, num_layers=layers, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.mul_(2 if layers == 2 else 0.7)  # far from uniform, and no token for certain
    name = "none" if drafter == "draft-model" else drafter
    step = tiny_step(name, model=model, num_slots=SLOTS, max_len=16, k_max=K)
    if drafter == "draft-model":
        with_draft_model(step, tiny_model(4, vocab_size=VOCAB, num_layers=1, dtype=torch.float32))
    state = step.state
    for slot in range(SLOTS):
        place(step, slot, PROMPT, temperature=1.0)
    state.verify[:SLOTS] = torch.arange(SLOTS) % 2  # standard, block
    if stops:
        step.drafter.early_stop = SecondDraftStops(step)
    start = {name: buffer.clone() for name, buffer in state.named_buffers() if name in ("seq_len", "last_token", "history")}
    graphs = StepGraphs(step, KeySet([GraphKey(SLOTS, K)]))
    state.set_rows(list(range(SLOTS)))
    pairs = np.zeros((REPLAYS // 2, SLOTS), dtype=np.int64)
    for sample in range(REPLAYS // 2):
        for name, value in start.items():
            getattr(state, name).copy_(value)
        state.seed[:SLOTS] = torch.arange(SLOTS) + sample * SLOTS
        graphs.replay(SLOTS, K)
        graphs.replay(SLOTS, K)
        pairs[sample] = state.history[:SLOTS, len(PROMPT) : len(PROMPT) + 2] @ torch.tensor([VOCAB, 1])
    assert graphs.hits == REPLAYS
    if stops:
        first, second = state.drafted_at[:SLOTS, :2].sum(0).tolist()
        assert 0.05 < second / first < 0.95
    law = two_tokens(model)
    assert 0.001 < law.min() < law.max() < 0.6
    bound = chi2.isf(1e-4, law.size - 1)
    # The test has power: a law that is off by a few per cent is told apart.
    every, off = np.bincount(pairs.ravel(), minlength=law.size), 0.9 * law + 0.1 / law.size
    assert chi_square(every, off)[0] > bound
    for method in Verify.STANDARD, Verify.BLOCK:
        rows = state.verify[:SLOTS] == method
        counts = np.bincount(pairs[:, rows].ravel(), minlength=law.size)
        assert chi_square(counts, law)[0] < bound
        accepted, drafted = int(state.accepted_at[:SLOTS][rows].sum()), int(state.drafted_at[:SLOTS][rows].sum())
        assert 0.02 < accepted / drafted < 0.98
