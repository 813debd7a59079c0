"""Padding rows change nothing, and a request does not notice who runs beside it (cases 12, 14, 15)."""

import pytest
import torch
from worlds import place, run, snapshot, text, tiny_model, tiny_step

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.modes import Mode

DRAFTERS = ("ngram", "early-exit:1", "draft-model:tiny", "eagle3:tiny", "hybrid:2:eagle3:tiny")


@pytest.mark.parametrize("slots", [[0, 1, 0], [3], [-2], [0, 1, 2, -1], [1.0], [True], "ab"])
def test_rows_that_cannot_run_together_are_refused(slots):
    """One request on two rows would advance twice; slot 3 is the null slot's own."""
    state = tiny_step("ngram", num_slots=3).state
    state.set_rows([2, -1, 1])
    with pytest.raises(ValueError, match=r"slots is .*; allowed are up to 3 of 0 to 2, each once, and -1"):
        state.set_rows(slots)
    assert state.slots.tolist() == [2, -1, 1]


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rows_beyond_the_batch_leave_every_other_slot_byte_for_byte(drafter, mode):
    step = tiny_step(drafter, num_slots=8, draft_seed=1)
    for slot in range(8):
        place(step, slot, [slot + 1, 5, slot + 1, 5, slot + 1], temperature=0.5 * slot, seed=slot)
    for slot in (5, 6, 7):  # live requests that sit out, with token ids no vocabulary has
        step.state.last_token[slot] = 10**6 + slot
    graphs = StepGraphs(step, KeySet([GraphKey(8, 3)]), mode=mode)
    graphs.capture()
    step.state.set_rows(list(range(8)))  # rows 5..7 are stale
    before = snapshot(step)
    graphs.replay(5, 3)
    after = snapshot(step)
    others = [5, 6, 7, 8]  # and the null slot
    blocks = torch.cat([step.state.block_table[slot] for slot in (5, 6, 7)] + [torch.tensor([0])])
    for name, was in before.items():
        now = after[name]
        if name.endswith("storage"):
            was, now = was[:, :, blocks], now[:, :, blocks]
        elif name == "drafter.feature" or (name.startswith("state.") and name not in ("state.slots", "state.results")):
            was, now = was[others], now[others]
        else:
            continue
        assert torch.equal(was, now), name
    assert not torch.equal(before["state.seq_len"][:5], after["state.seq_len"][:5])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_nan_in_null_block_and_in_unused_lanes_stays_there(drafter):
    """Case 13 at the level of a step: what is not a request's text may hold anything."""
    clean, poisoned = tiny_step(drafter, draft_seed=1), tiny_step(drafter, draft_seed=1)
    caches = [poisoned.kv] + ([poisoned.drafter.kv] if hasattr(poisoned.drafter, "kv") else [])
    for kv in caches:
        kv.storage.fill_(torch.nan)
    for step in (clean, poisoned):
        place(step, 1, [9, 8, 7, 9, 8], temperature=0.7, seed=3)
        for k in (3, 0, 2, 5):
            step.state.set_rows([-1, 1, -1])
            with torch.no_grad():
                step(3, k)
    assert text(clean, 1) == text(poisoned, 1)
    assert torch.equal(clean.state.accepted_at, poisoned.state.accepted_at)
    assert all(torch.isnan(kv.storage[:, :, 0]).all() for kv in caches)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_statistics_come_from_live_rows_only(drafter):
    """Case 14, with NaN in all that a padding row can read."""
    step = tiny_step(drafter, draft_seed=1)
    for kv in [step.kv] + ([step.drafter.kv] if hasattr(step.drafter, "kv") else []):
        kv.storage[:, :, 0] = torch.nan
    for slot in range(3):
        place(step, slot, [4, 5, 4, 5, 4])
    step.state.finished[2] = 1  # ended, still in the batch
    run(step, [0, -1, 2, -1], 3)
    assert step.state.steps.tolist() == [1, 0, 0, 0, 0]
    assert step.state.repaired.sum() == 0
    for counter in (step.state.drafted_at, step.state.accepted_at):
        assert counter[1:].sum() == 0
    assert step.state.drafted_at[0, 0] == 1


def test_growing_and_shrinking_batch_in_one_bucket_equals_runs_alone():
    """Case 15: 4 → 3 → 2 → 5 requests in a bucket of 8."""
    model = tiny_model(invariant=True)
    prompts = [[s + 1, 2 * s + 2, s + 1, 3, s + 1] for s in range(5)]

    def request(step, slot):
        place(step, slot, prompts[slot], temperature=0.8 if slot % 2 else 0.0, seed=slot)

    together = tiny_step("early-exit:1", model=model, num_slots=8)
    graphs = StepGraphs(together, KeySet([GraphKey(8, 2)]))
    for slot in range(5):
        request(together, slot)
    order = [[0, 1, 2, 3], [3, 1, 0], [1, 3], [4, 2, 0, 3, 1]]
    for slots in order:
        together.state.set_rows(slots)
        graphs.replay(len(slots), 2)

    for slot in range(5):
        alone = tiny_step("early-exit:1", model=model, num_slots=8)
        request(alone, slot)
        for _ in range(sum(slot in slots for slots in order)):
            run(alone, [slot], 2)
        assert text(together, slot) == text(alone, slot)
        assert torch.equal(together.state.accepted_at[slot], alone.state.accepted_at[slot])
