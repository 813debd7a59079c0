"""Look-up and head in one fixed shape: each row gets the one its own text calls for, and neither disturbs the other."""

import random

import pytest
import torch
from worlds import committed_kv, place, run, text, tiny_model, tiny_step

from stepgraph.capture.plan.shapes import StepShapes
from stepgraph.model.drafters import DrafterSpec

REPEATS, PLAIN = [3, 1, 4, 9, 3, 1, 4], [3, 1, 4, 1, 5, 9, 2]
NAME = "hybrid:3:eagle3:tiny"


def proposal(step, slots: list[int], k: int):
    step.state.set_rows(slots)
    with torch.no_grad():
        return step.drafter.propose(step.state.rows(len(slots), k, step.drafter.max_positions), k)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_each_row_drafts_what_its_text_calls_for(temperature):
    model = tiny_model(0, invariant=True)
    hybrid, lookup, head = (tiny_step(name, model=model, draft_seed=1) for name in (NAME, "ngram:3-4", "eagle3:tiny"))
    for step in (hybrid, lookup, head):
        place(step, 0, PLAIN, temperature=temperature, seed=5)
        place(step, 1, REPEATS, temperature=temperature, seed=6)
    drafted, found, modelled = (proposal(step, [0, 1], 4) for step in (hybrid, lookup, head))
    assert found.tokens.tolist() == [[-1] * 4, [9, 3, 1, 4]]
    assert torch.equal(drafted.tokens, torch.stack([modelled.tokens[0], found.tokens[1]]))
    assert drafted.one_hot.tolist() == [False, True]
    assert torch.equal(drafted.law[0], modelled.law[0])
    assert torch.equal(drafted.d2t, modelled.d2t)


def test_a_match_too_short_is_left_to_the_head():
    step = tiny_step("hybrid:4:eagle3:tiny", draft_seed=1)
    place(step, 0, REPEATS)
    assert proposal(step, [0], 2).one_hot.tolist() == [False]


def test_the_heads_state_does_not_depend_on_who_drafted():
    """After each step of a walk of k, as if the head had been prefilled with the text; both kinds of draft took part."""
    rng, model = random.Random(3), tiny_model(0, invariant=True)
    step = tiny_step("hybrid:1:eagle3:tiny", model=model, draft_seed=1)
    place(step, 2, PLAIN, temperature=0.9, seed=3)
    kinds = set()
    while not int(step.state.finished[2]):
        kinds.add(bool(proposal(step, [2], 3).one_hot))
        run(step, [2], rng.randrange(6))
        fresh = tiny_step("hybrid:1:eagle3:tiny", model=model, draft_seed=1)
        place(fresh, 2, text(step, 2), temperature=0.9, seed=3)
        kv = [committed_kv(each, 2, each.drafter.other.kv) for each in (step, fresh)]
        torch.testing.assert_close(*kv, rtol=0, atol=1e-12)
        torch.testing.assert_close(step.drafter.other.feature[2], fresh.drafter.other.feature[2], rtol=0, atol=1e-12)
    assert kinds == {False, True}


def test_names():
    shipped = DrafterSpec.parse("hybrid")
    assert (shipped.matches, shipped.modelled) == ((3, 4), DrafterSpec.parse("eagle3"))
    assert DrafterSpec.parse("hybrid:5:early-exit:2").matches == (5, 5)
    assert DrafterSpec.parse("hybrid:5:early-exit:2").with_layers(1).modelled.num_layers == 1
    for wrong in (
        "hybrid:",
        "hybrid:0",
        "hybrid:2:",
        "hybrid:2:ngram",
        "hybrid:2:draft-model:x",
        "hybrid:2:hybrid",
        "hybrid:x",
    ):
        with pytest.raises(ValueError, match="hybrid:MIN:early-exit:N"):
            DrafterSpec.parse(wrong)


def test_a_plan_takes_it():
    sizes = {"max_batch": 2, "max_len": 64, "k_max": 3, "block_size": 16, "dtype": torch.bfloat16}
    shapes = StepShapes("tiny-llama", "hybrid:2:eagle3:random", **sizes)
    assert not shapes.uniform
    assert shapes.step().drafter.name == "hybrid:2:eagle3:random"
    with pytest.raises(ValueError, match="eagle3:random"):
        StepShapes("tiny-llama", "hybrid", **sizes)
