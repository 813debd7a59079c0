"""Stops and limits, decided on the device inside the accepted run (cases 31 to 33)."""

import pytest
import torch
from worlds import ScriptedDrafter, place, run, text, tiny_model, tiny_step

from stepgraph.kernels.advance import LENGTH, RUNNING, STOPPED

PROMPT = [3, 1, 4, 1, 5, 9, 57, 57]


@pytest.fixture(scope="module")
def continuation() -> list[int]:
    """What greedy decoding says after PROMPT."""
    step = tiny_step("none")
    place(step, 0, PROMPT)
    for _ in range(12):
        run(step, [0], 0)
    tokens = text(step, 0)[len(PROMPT) :]
    assert len(set(tokens[:6])) == 6, "the cases below need distinct tokens"
    return tokens


def told_the_truth(continuation, **options):
    """A step whose drafter knows the continuation, so that everything is accepted."""
    drafter = ScriptedDrafter(4, 64)
    step = tiny_step(drafter, **options)
    drafter.script[:, len(PROMPT) : len(PROMPT) + len(continuation)] = torch.tensor(continuation)
    return step


@pytest.mark.parametrize("offset", range(6))
def test_stop_id_inside_the_accepted_run(continuation, offset):
    """[d1, d2, EOS, d4, d5, bonus] → 3 committed, and that step counts 3."""
    step = told_the_truth(continuation)
    place(step, 1, PROMPT, stop_ids=(58, continuation[offset]))
    run(step, [1], 5)
    assert text(step, 1) == PROMPT + continuation[: offset + 1]
    assert int(step.state.finished[1]) == STOPPED
    assert int(step.state.steps[1]) == 1
    assert int(step.state.drafted_at[1].sum()) == 5
    assert int(step.state.accepted_at[1].sum()) == min(offset + 1, 5)
    run(step, [1], 5)  # an ended request in the batch is padding
    assert text(step, 1) == PROMPT + continuation[: offset + 1]
    assert int(step.state.steps[1]) == 1


@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize("drafter", ["ngram", "early-exit:1", "draft-model:tiny"])
def test_exactly_max_new_tokens(continuation, drafter, k):
    """Case 32: n new tokens for n = 1 .. k + 2, equal to plain greedy."""
    for n in range(1, k + 3):
        step = tiny_step(drafter)
        place(step, 0, PROMPT, limit=len(PROMPT) + n)
        for _ in range(n):
            run(step, [0], k)
        assert text(step, 0) == PROMPT + continuation[:n]
        assert int(step.state.finished[0]) == LENGTH


@pytest.mark.parametrize("drafter", ["early-exit:1", "draft-model:tiny"])
def test_nothing_is_written_beyond_the_room(drafter):
    """Case 33: max_len 16, 14 present, k = 5."""
    step = tiny_step(drafter, max_len=16, block_size=8, num_slots=3)
    prompt = [(7 * i) % 50 for i in range(14)]
    place(step, 1, prompt)
    caches = [step.kv] + ([step.drafter.kv] if hasattr(step.drafter, "kv") else [])
    before = [kv.storage.clone() for kv in caches]
    for _ in range(3):
        run(step, [1], 5)
    assert int(step.state.finished[1]) == LENGTH
    assert len(text(step, 1)) == 16
    # Position 15 holds the last token, which never enters the cache: block 2 of the slot is written up to position 14.
    # A draft model catches up on position 12, which the prefill wrote already.
    blocks = step.state.block_table[1].tolist()
    for kv, was in zip(caches, before, strict=True):
        changed = (kv.storage != was).flatten(4).any(-1).any(0).any(0)
        changed_positions = {(block, offset) for block, offset in changed.nonzero().tolist()}
        assert changed_positions <= {(blocks[1], offset) for offset in range(12 - 8, 15 - 8)}
    assert step.state.history[0].sum() == 0
    assert step.state.history[2:].sum() == 0


def test_one_token_of_room_means_no_drafts(continuation):
    step = told_the_truth(continuation)
    place(step, 0, PROMPT, limit=len(PROMPT) + 1)
    run(step, [0], 4)
    assert text(step, 0) == PROMPT + continuation[:1]
    assert int(step.state.drafted_at.sum()) == 0


def test_the_drafters_own_largest_position_ends_drafting_not_decoding():
    """Case 33: a draft model with 12 positions behind a target with 64."""
    target = tiny_model(0)
    limited, plain = tiny_step("draft-model:tiny", model=target), tiny_step("none", model=target)
    limited.drafter.max_positions = 12
    for step in (limited, plain):
        place(step, 0, PROMPT, limit=24)
    for _ in range(20):
        run(limited, [0], 3)
        run(plain, [0], 0)
    assert text(limited, 0) == text(plain, 0)
    assert int(limited.state.finished[0]) == LENGTH
    beyond = limited.drafter.kv.storage[:, :, limited.state.block_table[0]].flatten(2, 3)[:, :, 12:]
    assert int(beyond.count_nonzero()) == 0
    assert 0 < int(limited.state.drafted_at[0, 0]) < int(limited.state.steps[0])


def test_a_request_may_switch_speculation_off(continuation):
    step = told_the_truth(continuation)
    place(step, 0, PROMPT, draft_limit=0)
    place(step, 1, PROMPT, draft_limit=2)
    run(step, [0, 1], 5)
    assert step.state.drafted_at[:2].tolist() == [[0] * 5, [1, 1, 0, 0, 0]]
    assert text(step, 0) == PROMPT + continuation[:1]
    assert text(step, 1) == PROMPT + continuation[:3]
    assert int(step.state.finished[0]) == RUNNING


@pytest.mark.parametrize("first_missing", range(4))
def test_no_draft_from_a_column_on(continuation, first_missing):
    """Case 11: −1 from column j on: accepted ≤ j, emitted ≤ j + 1; never embedded, never counted as drafted."""
    step = told_the_truth(continuation)
    place(step, 0, PROMPT)
    step.drafter.script[0, len(PROMPT) + first_missing] = -1  # later columns hold tokens again: they must not count
    embedded = []
    forward = step.target.hidden_and_features
    step.target.hidden_and_features = lambda tokens, *rest: (embedded.append(tokens.clone()), forward(tokens, *rest))[1]
    run(step, [0], 5)
    assert step.state.drafted_at[0].tolist() == [1] * first_missing + [0] * (5 - first_missing)
    assert step.state.accepted_at[0].tolist() == step.state.drafted_at[0].tolist()
    assert text(step, 0) == PROMPT + continuation[: first_missing + 1]
    assert embedded[0].tolist() == [[PROMPT[-1], *continuation[:first_missing], *[-1] * (5 - first_missing)]]
    written = step.kv.storage[0, 0, step.state.block_table[0]].flatten(0, 1).abs().sum((1, 2)) > 0
    assert written.nonzero().flatten().tolist() == list(range(len(PROMPT) + first_missing))
