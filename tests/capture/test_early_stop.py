"""Rows that stop drafting early: what stops them, what is counted, and that no greedy text changes.

Their law across replays is in `test_step_law.py`.
"""

import pytest
import torch
from worlds import place, run, text, tiny_model, tiny_step

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.request import SamplingParams
from stepgraph.model.drafters import EarlyStop

DRAFTERS = ("early-exit:1", "draft-model:tiny", "eagle3:tiny", "hybrid:3:eagle3:tiny")


def test_formulas():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [5.0, 0.0, 0.0, 0.0], [float("-inf"), 1.0, float("-inf"), float("-inf")]])
    law = logits.double().softmax(-1)
    for threshold in (0.2, 0.5, 0.97):
        assert EarlyStop("confidence", threshold).keeps(logits).tolist() == (law.amax(-1) >= threshold).tolist()
    entropy = -(law * law.clamp(min=1e-300).log()).sum(-1)
    for gamma in (0.1, 0.4):
        bound = 1 - (gamma * entropy).sqrt()
        for threshold in (0.1, 0.6, 0.999):
            assert EarlyStop("entropy", threshold, gamma).keeps(logits).tolist() == (bound >= threshold).tolist()
    assert EarlyStop("entropy", 1.0).keeps(logits).tolist() == [False, False, True]


def test_names():
    assert EarlyStop.parse("confidence:0.4") == EarlyStop("confidence", 0.4)
    assert EarlyStop.parse("entropy:0.3:0.1") == EarlyStop("entropy", 0.3, 0.1)
    for wrong in (
        "",
        "confidence",
        "confidence:x",
        "confidence:2",
        "confidence:-1",
        "confidence:0.5:0.1",
        "entropy:nan",
        "e:1",
    ):
        with pytest.raises(ValueError, match=r"allowed are confidence:THRESHOLD"):
            EarlyStop.parse(wrong)
    with pytest.raises(ValueError, match="early_stop needs a drafter that runs a model; drafter is 'ngram'"):
        build_engine(EngineOptions("random:tiny-llama", "ngram", early_stop="confidence:0.5"))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_row_stops_where_its_drafter_is_unsure_and_counts_no_further(drafter):
    """The drafts up to the stop are those of a drafter that never stops; one below the threshold ends the row."""
    model = tiny_model(0, invariant=True)
    plain, stopping = (tiny_step(drafter, model=model, draft_seed=1, early_stop=rule) for rule in (None, "confidence:0.09"))
    prompt = [3, 1, 4, 1, 5, 9, 2]
    lengths = []
    for seed in range(8):
        drafted = []
        for step in (plain, stopping):
            place(step, seed % 4, [*prompt, seed], temperature=0.9, seed=seed)
            step.state.set_rows([seed % 4])
            rows = step.state.rows(1, 5, step.drafter.max_positions)
            with torch.no_grad():
                drafted.append(step.draft(rows, 5).tokens[0].tolist())
        kept = drafted[1].index(-1) if -1 in drafted[1] else 5
        assert drafted[1] == drafted[0][:kept] + [-1] * (5 - kept)
        before = int(stopping.state.drafted_at[seed % 4].sum())
        run(stopping, [seed % 4], 5)
        assert int(stopping.state.drafted_at[seed % 4].sum()) - before == kept
        lengths.append(kept)
    assert len(set(lengths)) > 1


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("rule", ["confidence:0.05", "entropy:0.2", "confidence:1"])
def test_greedy_text_does_not_change(drafter, rule):
    model = tiny_model(0, invariant=True)
    texts, drafted = [], 0
    for name, k in ((drafter, 4), ("none", 0)):
        step = tiny_step(name, model=model, draft_seed=1, early_stop=rule if k else None)
        place(step, 0, [3, 1, 4, 1, 5], limit=40)
        while not int(step.state.finished[0]):
            run(step, [0], k)
        texts.append(text(step, 0))
        drafted += int(step.state.drafted_at[0].sum())
    assert texts[0] == texts[1]
    assert drafted == 0 if rule == "confidence:1" and "hybrid" not in drafter else True


def test_engine_and_request_limits():
    """`early_stop` and a request's own `draft_limit` through the engine: text as without, and fewer drafts."""
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7]]
    found = {}
    for name, rule, limit in (("plain", None, None), ("stop", "entropy:0.5", None), ("limit", None, 1), ("off", None, 0)):
        options = EngineOptions(
            "random:tiny-llama", "early-exit:1", k=4, max_batch=2, max_len=64, dtype="float64", early_stop=rule
        )
        outputs = build_engine(options).engine.generate(prompts, SamplingParams(max_new_tokens=20, draft_limit=limit))
        found[name] = ([o.token_ids for o in outputs], sum(sum(o.drafted_at) for o in outputs), outputs[0].drafted_at)
    assert len({str(tokens) for tokens, _, _ in found.values()}) == 1
    assert found["stop"][1] < found["plain"][1]
    assert found["limit"][2][1:] == [0, 0, 0]
    assert found["limit"][1] > 0
    assert found["off"][1] == 0
