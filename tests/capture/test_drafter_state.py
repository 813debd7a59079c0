"""A drafter's own state after any sequence of k (cases 26 to 29)."""

import random

import pytest
import torch
from worlds import ScriptedDrafter, committed_kv, place, run, snapshot, text, tiny_model, tiny_step

from stepgraph.capture.trace import trace_step
from stepgraph.kernels.philox import Stream
from stepgraph.kernels.sampling import draw
from stepgraph.model.drafters import Proposal

PROMPT = [3, 1, 4, 1, 5, 9]


def draft_model_world(invariant: bool = True, **options):
    """Another model than the target drafts; row-invariant products, so that equal means equal bits."""
    step = tiny_step("draft-model:other", model=tiny_model(0, invariant=invariant), draft_seed=1, **options)
    step.drafter.model.invariant_linear = invariant
    return step


def next_proposal(step, slot: int, k: int) -> Proposal:
    step.state.set_rows([slot])
    with torch.no_grad():
        return step.drafter.propose(step.state.rows(1, k, None), k)


def force(step, slot: int, tokens: list[int]) -> None:
    """Make the request's text up to now `PROMPT + tokens`, whatever was accepted."""
    state, length = step.state, len(PROMPT) + len(tokens)
    state.history[slot, :length] = torch.tensor(PROMPT + tokens)
    state.seq_len[slot], state.last_token[slot] = length - 1, (PROMPT + tokens)[-1]


def test_k_that_rests_at_zero_leaves_the_drafter_as_if_it_never_rested():
    """Case 26: k = 3,3,0,0,0,3,3 against 3 throughout, the same tokens."""
    resting, steady = draft_model_world(), draft_model_world()
    for step in (resting, steady):
        place(step, 0, PROMPT)
    for k in (3, 3, 0, 0, 0):
        run(resting, [0], k)
    while int(steady.state.seq_len[0]) < int(resting.state.seq_len[0]):
        run(steady, [0], 3)
    # Both are greedy, so the texts agree as far as both go; cut the longer one back to the shorter.
    tokens = text(resting, 0)[len(PROMPT) :]
    assert text(steady, 0)[: len(PROMPT) + len(tokens)] == PROMPT + tokens
    force(steady, 0, tokens)
    proposals = [next_proposal(step, 0, 3) for step in (resting, steady)]
    assert torch.equal(proposals[0].tokens, proposals[1].tokens)
    assert torch.equal(proposals[0].law, proposals[1].law)
    kv = [committed_kv(step, 0, step.drafter.kv) for step in (resting, steady)]
    assert torch.equal(kv[0], kv[1])
    before = [step.state.accepted_at[0].sum() for step in (resting, steady)]
    for step in (resting, steady):
        run(step, [0], 3)
    gained = [step.state.accepted_at[0].sum() - was for step, was in zip((resting, steady), before, strict=True)]
    assert gained[0] >= gained[1]


def recomputed_kv(step, slot: int) -> torch.Tensor:
    """The drafter's cache as a prefill of the committed text gives it."""
    fresh = draft_model_world()
    committed = text(step, slot)
    place(fresh, slot, committed)
    return committed_kv(fresh, slot, fresh.drafter.kv)


def test_all_accepted_drafts_are_in_the_drafters_cache():
    """Case 27: the last accepted draft was never an input of the drafter; the next pass must catch it up."""
    step = tiny_step("draft-model:tiny", model=tiny_model(0), draft_seed=0)  # the target's twin: everything is accepted
    place(step, 0, PROMPT)
    run(step, [0], 3)
    assert step.state.accepted_at[0].tolist() == [1, 1, 1, 0, 0]
    next_proposal(step, 0, 1)
    torch.testing.assert_close(committed_kv(step, 0, step.drafter.kv), committed_kv(step, 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("accepted", range(4))
def test_after_any_accept_pattern_the_cache_equals_a_recompute(accepted):
    step = draft_model_world()
    place(step, 0, PROMPT)
    # Force the outcome: the first `accepted` proposals, then some token; the caches are as a step with that outcome left them.
    proposed = next_proposal(step, 0, 3).tokens[0].tolist()
    force(step, 0, [*proposed[:accepted], 17])
    next_proposal(step, 0, 3)
    torch.testing.assert_close(committed_kv(step, 0, step.drafter.kv), recomputed_kv(step, 0), rtol=0, atol=1e-12)


def test_forced_rejection_then_replay_equals_eager():
    """Case 28: a rejection at position 0 leaves drafted KV behind that the next step must overwrite."""
    steps = []
    for _ in range(2):
        drafter = ScriptedDrafter(4, 64)
        step = tiny_step(drafter)
        place(step, 0, PROMPT)
        drafter.script[0] = 60  # nearly always wrong
        steps.append(step)
    graph = trace_step(steps[0], 1, 3)
    steps[0].state.set_rows([0])
    for _ in range(6):
        graph.replay()
        run(steps[1], [0], 3)
    left, right = snapshot(steps[0]), snapshot(steps[1])
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert int(steps[0].state.accepted_at.sum()) == 0
    plain = tiny_step("none")
    place(plain, 0, PROMPT)
    for _ in range(6):
        run(plain, [0], 0)
    assert text(plain, 0) == text(steps[0], 0)
    torch.testing.assert_close(committed_kv(plain, 0), committed_kv(steps[0], 0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("drafter", ["ngram", "draft-model:other", "early-exit:1", "eagle3:tiny"])
def test_state_depends_on_the_tokens_alone(drafter):
    """After any sequence of k the committed state equals that of any other sequence with the same tokens."""
    rng = random.Random(0)
    model = tiny_model(0, invariant=True)
    walks = []
    for _ in range(3):
        step = tiny_step(drafter, model=model, draft_seed=1)
        if hasattr(step.drafter, "model"):
            step.drafter.model.invariant_linear = True
        place(step, 2, PROMPT, limit=40)
        while not int(step.state.finished[2]):
            run(step, [2], rng.randrange(6))
        walks.append(step)
    for other in walks[1:]:
        assert text(walks[0], 2) == text(other, 2)
        assert torch.equal(committed_kv(walks[0], 2), committed_kv(other, 2))


def test_draft_is_drawn_from_the_law_it_reports():
    step = draft_model_world()
    place(step, 0, PROMPT, temperature=0.8, seed=11)
    proposal = next_proposal(step, 0, 3)
    rows = step.state.rows(1, 3, None)
    for column in range(3):
        position = rows.seq_len + 1 + column
        redrawn = draw(proposal.law[:, column], rows.seed, position, rows.seq_len, int(Stream.DRAFT))
        assert torch.equal(redrawn, proposal.tokens[:, column])
    assert torch.allclose(proposal.law.sum(-1), torch.ones(1, 3, dtype=torch.float64))
