"""The laws that drafts are accepted by are those they were drawn from in the same step (cases 22, 25, 30)."""

import numpy as np
import pytest
import torch
from worlds import place, run, snapshot, text, tiny_step

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.trace import trace_step

SAMPLED = ("early-exit:1", "draft-model:tiny", "eagle3:tiny")


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Memory that is not written yet holds NaN (or the largest integer) instead of what happens to be there."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(was)


@pytest.mark.parametrize("drafter", SAMPLED)
def test_the_law_is_made_in_the_step_and_outlives_none(drafter):
    """Cases 22 and 25 by construction: the law enters the acceptance test from nodes of its own step, with all k columns."""
    for k in range(1, 6):
        traced = trace_step(tiny_step(drafter, draft_seed=1), 2, k)
        verdict = next(node for node in traced.nodes if "rejection_sample" in str(node.target))
        law = verdict.args[2]
        assert law.op == "call_function"
        assert law.meta["val"].shape == (2, k, 40 if drafter == "eagle3:tiny" else 61)
        made_by = [node for node in traced.nodes if "token_law" in str(node.target)]
        assert len(made_by) == k


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("drafter", SAMPLED)
def test_first_replay_after_capture_equals_eager_whatever_memory_holds(drafter):
    """Case 22, and 25: a column of a law that nobody wrote would be NaN here, and so would acceptance be another."""
    graphs = StepGraphs(tiny_step(drafter, draft_seed=1), KeySet(GraphKey(4, k) for k in range(6)))
    eager = tiny_step(drafter, draft_seed=1)
    graphs.capture()
    for k in (5, 1, 0, 3, 2, 4):
        for step in (graphs.step, eager):
            for slot in range(3):
                place(step, slot, [slot, 7, slot, 7], temperature=0.9, seed=10 * k + slot)
        graphs.step.state.set_rows([0, 1, 2])
        graphs.replay(3, k)
        run(eager, [0, 1, 2, -1], k)
        left, right = snapshot(graphs.step), snapshot(eager)
        assert all(torch.equal(left[name], right[name]) for name in left if name != "state.results"), k
        assert torch.equal(left["state.results"][:, : 6 + k], right["state.results"][:, : 6 + k])


def next_law(model, tokens: list[int]) -> np.ndarray:
    """`[V]`: law of the token after `tokens`, from one plain pass over them."""
    step = tiny_step("none", model=model, num_slots=1)
    place(step, 0, tokens)
    rows = step.state
    rows.set_rows([0])
    with torch.no_grad():
        view = rows.rows(1, 0, None)
        query = view.query(view.seq_len, 1, step.kv.block_size, live=view.live, writable=view.seq_len + 1)
        hidden = step.target.hidden(view.last_token[:, None], query, step.kv)
        return step.target.logits(hidden)[0, 0].softmax(-1).numpy()


def test_acceptance_of_an_independent_drafter_is_the_overlap_of_the_laws():
    """Case 30: two random models agree as far as Σ min(p, q) says, at every step, and not always (which stale state gives)."""
    step = tiny_step("draft-model:tiny", draft_seed=1)
    expected, accepted = [], 0
    for slot in range(4):
        place(step, slot, [slot, 3, 9], temperature=1.0, seed=slot)
    for _ in range(40):
        before = [text(step, slot) for slot in range(4)]
        counted = int(step.state.accepted_at.sum())
        run(step, [0, 1, 2, 3], 1)
        accepted += int(step.state.accepted_at.sum()) - counted
        for tokens in before:
            p, q = next_law(step.target, tokens), next_law(step.drafter.model, tokens)
            expected.append(np.minimum(p, q).sum())
        for slot in range(4):
            if int(step.state.seq_len[slot]) > 40:
                place(step, slot, [slot, 5, 9], temperature=1.0, seed=100 + len(expected))
    overlap = np.array(expected)
    sigma = np.sqrt((overlap * (1 - overlap)).sum())
    assert len(overlap) == 160
    assert abs(accepted - overlap.sum()) < 4 * sigma
    assert overlap.mean() < 0.9
    assert abs(len(overlap) - overlap.sum()) > 6 * sigma  # the test could tell 1.00 apart
