"""Policies that learn, all of them: what they may choose, what they save, their options, and that they change no token."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import table

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.policies import (
    ADAPTIVE,
    BanditPolicy,
    GoodputPolicy,
    KPolicy,
    LadderPolicy,
    make_adaptive,
    policy_from_dict,
)
from stepgraph.capture.request import SamplingParams


def policies():
    return [LadderPolicy({1: {"ks": [0, 1, 3, 5]}, 4: {"ks": [0, 2]}}), GoodputPolicy(table()), BanditPolicy(table())]


@settings(deadline=None)
@given(st.integers(0, 2), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), max_size=60), st.integers(1, 40))
def test_choices_are_reachable_captured_and_replayed_from_saved_state(which, before, after):
    policy = policies()[which]
    reachable, keys = policy.reachable(9), policy.keys(9)
    rng = random.Random(after)

    def step(policy, batch, share):
        requests = list(range(batch))
        k = policy.choose(batch, 100 * share, requests)
        policy.observe(k, [min(k, share)] * batch, 0, requests)
        return k

    for batch, share in before:
        k = step(policy, batch, share)
        assert (batch, k) in reachable
        assert keys.lookup(batch, k) is not None
    restored = policy_from_dict(json.loads(json.dumps(policy.to_dict())))
    sequence = [(rng.randint(1, 9), rng.randint(0, 9)) for _ in range(after)]
    assert [step(restored, *each) for each in sequence] == [step(policy, *each) for each in sequence]


def test_all_keep_the_protocol():
    assert all(isinstance(policy, KPolicy) for policy in policies())
    assert set(ADAPTIVE) == {"ladder", "goodput", "bandit"}


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("oracle", {}, "policy is 'oracle'; it must be one of ladder, goodput, bandit"),
        ("goodput", {}, "policy goodput needs the option 'cost'"),
        ("bandit", {"price": 1}, "policy bandit has no option 'price'; it has cost, ks"),
        ("ladder", ["ema"], "must be an object"),
        ("ladder", {"ema": 2}, "ema is 2; it must be a number from 0 to 1"),
        ("ladder", {"slots": {"2": {"ks": [1]}}}, "one must start at batch size 1"),
        ("ladder", {"slots": {"1": {"k": [1]}}}, "slot 1 is .*; it must have ks"),
        ("ladder", {"slots": {"1": {"ks": []}}}, "ks is empty"),
        ("ladder", {"slots": {"1": {"ks": [99]}}}, "a k in ks is 99; it must be an integer from 0 to 16"),
        ("ladder", {"interval": 0}, "interval is 0"),
        ("goodput", {"cost": "missing.json"}, "profile missing.json cannot be read"),
        ("goodput", {"cost": 5}, "a profile is 5; it must be the path of a file"),
        ("bandit", {"cost": ["a.json"]}, "a profile is .*; it must be the path of a file"),
        ("goodput", {"cost": table(), "iid": "false"}, "iid is 'false'; it must be true or false"),
        ("goodput", {"cost": table(), "learn": None}, "learn is None; it must be true or false"),
        ("goodput", {"cost": table(), "ks": [0, 9]}, "ks has 9; the cost table has 0, 1"),
        ("goodput", {"cost": table(), "prior": "high"}, "prior is 'high'"),
        ("goodput", {"cost": table(), "prior": 1.5}, "prior is 1.5"),
        ("bandit", {"cost": table(), "exploration": -1}, "exploration is -1"),
    ],
)
def test_options_are_checked(kind, options, reason):
    with pytest.raises(ValueError, match=reason):
        make_adaptive(kind, options)


def test_no_policy_takes_an_empty_batch():
    for policy in policies():
        with pytest.raises(ValueError, match="batch is 0"):
            policy.choose(0)


@pytest.mark.parametrize("kind", ADAPTIVE)
@pytest.mark.parametrize("drafter", ["ngram", "early-exit:1"])
def test_greedy_text_is_the_same_whatever_chooses_k(kind, drafter, tmp_path):
    """Case 19 with a policy at the wheel: k changes while requests come and go, and no token does."""
    profile = tmp_path / "profile.json"
    rows = table(lambda batch, k: 10 + 0.3 * k).rows
    profile.write_text(json.dumps({"schema": "stepgraph.profile/1", "rows": rows}))
    options = {"ladder": {"slots": {"1": {"ks": [0, 2, 4]}}, "interval": 1, "warm_up": 0, "ema": 0.9},
               "goodput": {"cost": str(profile), "hold_steps": 0, "memory": 0.5, "probe_interval": 3},
               "bandit": {"cost": str(profile), "hold_steps": 1, "exploration": 1}}[kind]  # fmt: skip
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [7], [9, 8, 9, 8, 9], [5, 5, 5], [100, 3]]
    params = [SamplingParams(max_new_tokens=n) for n in (30, 9, 25, 18, 12)]
    outputs, ks = [], set()
    for choice in ({"policy": kind, "policy_options": options}, {"k": 0}):
        built = build_engine(EngineOptions("random:tiny-llama", drafter, **choice, max_batch=3, max_len=64, dtype="float64"))
        if "policy" in choice:
            built.engine.on_step = lambda record: ks.add(record.k_run)
        outputs.append([output.token_ids for output in built.engine.generate(prompts, params)])
        assert built.engine.graphs.misses == 0
    assert outputs[0] == outputs[1]
    assert len(ks) > 1
