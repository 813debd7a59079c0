"""The law of what captured steps emit, over a thousand replays of one graph, for each kind of drafter and both methods."""

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from worlds import place, tiny_model, tiny_step

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.kernels.rejection import Verify
from stepgraph.kernels.rejection.law import chi_square

VOCAB, SLOTS, K = 4, 8, 2
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


@pytest.mark.parametrize(
    ("drafter", "verify", "replays"),
    [
        ("ngram", Verify.STANDARD, 1000),
        ("ngram", Verify.BLOCK, 1000),
        ("early-exit:1", Verify.STANDARD, 1000),
        ("early-exit:1", Verify.BLOCK, 500),
        ("draft-model:tiny", Verify.STANDARD, 1000),
        ("eagle3:tiny", Verify.STANDARD, 1000),
        ("eagle3:tiny", Verify.BLOCK, 500),
    ],
)
def test_law_across_replays(drafter, verify, replays):
    model = tiny_model(5, vocab_size=VOCAB, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.mul_(2)  # far from uniform, and no token for certain
    # The draft model is a model of another seed with the same tiny vocabulary.
    step = tiny_step("none" if drafter.startswith("draft") else drafter, model=model, num_slots=SLOTS, max_len=16, k_max=K)
    if drafter.startswith("draft"):
        from stepgraph.model.drafters import DraftModelDrafter
        from stepgraph.model.kv_cache import PagedKV

        small = tiny_model(4, vocab_size=VOCAB, dtype=torch.float32)
        own = PagedKV(small.config, num_blocks=step.kv.num_blocks, block_size=step.kv.block_size, dtype=small.dtype)
        step.drafter = DraftModelDrafter(small, own, "tiny")
    state = step.state
    for slot in range(SLOTS):
        place(step, slot, PROMPT, temperature=1.0)
    state.verify[:SLOTS] = int(verify)
    start = {name: buffer.clone() for name, buffer in state.named_buffers() if name in ("seq_len", "last_token", "history")}
    graphs = StepGraphs(step, KeySet([GraphKey(SLOTS, K)]))
    state.set_rows(list(range(SLOTS)))
    counts = np.zeros((VOCAB, VOCAB))
    for sample in range(replays // 2):
        for name, value in start.items():
            getattr(state, name).copy_(value)
        state.seed[:SLOTS] = torch.arange(SLOTS) + sample * SLOTS
        graphs.replay(SLOTS, K)
        graphs.replay(SLOTS, K)
        pairs = state.history[:SLOTS, len(PROMPT) : len(PROMPT) + 2].numpy()
        np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)
    assert graphs.hits == replays
    law = two_tokens(model)
    statistic, dof = chi_square(counts, law)
    assert statistic < chi2.isf(1e-4, dof)
    accepted, drafted = int(state.accepted_at[:SLOTS].sum()), int(state.drafted_at[:SLOTS].sum())
    assert 0.02 < accepted / drafted < 0.98
    # The test has power: a law that is off by a few per cent is told apart.
    assert 0.001 < law.min() < law.max() < 0.6
    assert chi_square(counts, 0.9 * law + 0.1 / law.size)[0] > chi2.isf(1e-4, dof)
