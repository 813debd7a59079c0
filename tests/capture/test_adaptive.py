"""Policies that learn: their rules at the thresholds, their estimates, what they save, and that they change no token."""

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.cli import main
from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.policies import (
    ADAPTIVE,
    BanditPolicy,
    GoodputPolicy,
    KPolicy,
    LadderPolicy,
    make_adaptive,
    policy_from_dict,
)
from stepgraph.capture.policies.adaptive import PositionRates, RequestRates, expected_tokens
from stepgraph.capture.policies.ladder import Rungs
from stepgraph.capture.request import SamplingParams

KS = range(6)


def table(step=lambda batch, k: 10 + 0.5 * k + 0.02 * batch * (k + 1), ks=KS, batches=(1, 4, 16)) -> CostTable:
    return CostTable({"batch": n, "k": k, "context": 64, "step_ms": step(n, k)} for n in batches for k in ks)


def draws(rates, k, requests, rng):
    """Accepted counts of requests whose position j is accepted with rates[j]."""
    return [next((j for j in range(k) if rng.random() >= rates[j]), k) for _ in range(requests)]


def policies():
    return [LadderPolicy({1: {"ks": [0, 1, 3, 5]}, 4: {"ks": [0, 2]}}), GoodputPolicy(table()), BanditPolicy(table())]


# -- the ladder


def on_rung(k: int, average: float, **options) -> LadderPolicy:
    """A ladder past its warm-up whose average will be `average` at the next decision."""
    policy = LadderPolicy({1: Rungs((0, 1, 3, 5), **options)}, initial_k=k, ema=0.0, warm_up=0, interval=1)
    data = policy.to_dict()
    data["state"]["1"]["average"] = average
    return LadderPolicy.from_dict(data)


@pytest.mark.parametrize(
    ("k", "threshold", "below", "above"),
    [
        (5, 2.25, 3, 5),  # drop to 3 at 3 − 0.5 − 0.25
        (3, 0.25, 0, 3),  # drop to 1 at 1 − 0.5 − 0.25, and on to 0 at 0.5 − 0.25, the same number
        (1, 0.25, 0, 1),  # drop to 0 at 0.5 − 0.25
        (1, 0.5, 1, 3),  # rise from 1 above 1 − 0.5
        (3, 2.5, 3, 5),  # rise from 3 above 3 − 0.5
    ],
)
def test_case_44_a_hair_beside_each_threshold(k, threshold, below, above):
    for side, expected in ((-1e-6, below), (1e-6, above)):
        policy = on_rung(k, threshold + side)
        policy.observe(k, [0])
        assert policy.choose(1) == expected


def test_a_decision_may_take_several_rungs_but_one_direction():
    policy = on_rung(5, 0.24)
    policy.observe(5, [0])
    assert policy.choose(1) == 0
    policy = on_rung(1, 4.6)
    policy.observe(1, [0])
    assert policy.choose(1) == 5


def test_the_published_ladder_step_by_step():
    """10 rounds of warm-up, a decision every 5, average 0.2: by hand, from all drafts accepted and then none."""
    policy = LadderPolicy({1: {"ks": [1, 3, 5, 7]}}, initial_k=3)
    average, k, ks = 2.0, 3, []
    for rounds in range(1, 61):
        accepted = k if rounds <= 30 else 0
        average = 0.8 * average + 0.2 * accepted
        policy.observe(k, [accepted])
        if rounds > 10 and rounds % 5 == 0:
            rungs = [1, 3, 5, 7]
            at = start = rungs.index(k)
            while at > 0 and average <= rungs[at - 1] - 0.75:
                at -= 1
            while at >= start and at < 3 and average > rungs[at] - 0.5:
                at += 1
                start = at
            k = rungs[at]
        assert policy.choose(1) == k
        ks.append(k)
    assert ks[9] == 3
    assert max(ks) == 7
    assert ks[-1] == 1


def test_zero_is_left_by_a_probe_and_returned_to():
    policy = LadderPolicy({1: {"ks": [0, 1]}}, initial_k=1)
    ks = []
    for _ in range(120):
        ks.append(policy.choose(1))
        policy.observe(ks[-1], [0])
    assert {0, 1} == set(ks[30:])
    assert ks[30:].count(0) >= ks[30:].count(1)


def test_a_round_that_ran_at_another_k_teaches_nothing():
    policy = LadderPolicy({1: {"ks": [1, 3]}}, initial_k=3)
    before = policy.to_dict()
    for _ in range(40):
        policy.observe(1, [1])
        policy.observe(3, [])
    assert policy.to_dict() == before


def test_each_range_of_batches_has_its_own_ladder():
    policy = LadderPolicy()
    assert [sorted({k for n, k in policy.reachable(100) if n == batch}) for batch in (7, 8, 31, 32, 63, 64)] == [
        [1, 3, 5, 7], [0, 1, 3], [0, 1, 3], [0, 1], [0, 1], [0]]  # fmt: skip
    for _ in range(60):
        policy.observe(policy.choose(2), [0, 0])
    assert policy.choose(2) == 1
    assert policy.choose(8) == 1  # its middle rung, untouched


# -- acceptance by position


@settings(deadline=None)
@given(st.floats(0, 1), st.integers(0, 8))
def test_expected_tokens_are_leviathans_where_all_rates_are_one(rate, k):
    closed = k + 1 if rate == 1 else (1 - rate ** (k + 1)) / (1 - rate)
    assert expected_tokens(np.full(k, rate))[-1] == pytest.approx(closed)


def test_rates_by_hand():
    rates = PositionRates([0.8, 0.4, 0.4], memory=0.5, weight=1.0)
    rates.observe(2, [2, 0])
    rates.observe(3, [1])
    # Position 0: 0.5 of 2 reached and of 1 accepted, then 1 of each; position 1: 0.5 · 1 and 0.5 · 1, then 1 reached.
    first = (1.5 + 0.8) / (2 + 1)
    second = (0.5 + first / 2) / (1.5 + 1)
    assert rates.rates() == pytest.approx([first, second, second])
    own = RequestRates(3, memory=0.5, weight=1.0)
    common = [0.8, 0.4, 0.2]
    np.testing.assert_allclose(own.rates([7, 9], common), [common, common])
    own.observe(2, [9, 7, 8], [2, 0, 1])
    own.observe(3, [9], [1])
    expected = [[0.8 / 2, 0.4, 0.2], [(1.5 + 0.8) / 2.5, (0.5 + 0.4) / 2.5, 0.2]]
    np.testing.assert_allclose(own.rates([7, 9], common), expected)
    np.testing.assert_allclose(own.rates([9, 5], common), [expected[1], common])


@pytest.mark.parametrize("pooled", [False, True])
def test_rates_find_the_truth(pooled):
    rng, truth = random.Random(1), [0.8, 0.8, 0.8] if pooled else [0.9, 0.5, 0.7]
    rates = PositionRates([0.3] * 3, memory=0.999, weight=2.0, pooled=pooled)
    for _ in range(3000):
        rates.observe(3, draws(truth, 3, 4, rng))
    np.testing.assert_allclose(rates.rates(), truth, atol=0.02)


# -- goodput


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 0.8, 0.95])
@pytest.mark.parametrize("batch", [1, 4, 7, 16])
def test_goodput_is_the_argmax_when_it_knows_the_world(rate, batch):
    policy, cost = GoodputPolicy(table(), prior=rate, learn=False), table()
    promised = [sum(rate**j for j in range(k + 1)) / cost.step_ms(batch, k) for k in KS]
    assert {policy.choose(batch) for _ in range(300)} == {int(np.argmax(promised))}


def test_goodput_learns_and_leaves_zero():
    """Case 44's probe, for a policy without a ladder: drafts are worthless, then all are accepted."""
    cost = table(lambda batch, k: 10 + 3 * k)
    policy, rng, ks = GoodputPolicy(cost, memory=0.9), random.Random(2), []
    for step in range(3000):
        ks.append(policy.choose(2, 100, [5, 6]))
        rates = [0.02] * 5 if step < 1000 else [0.98] * 5
        policy.observe(ks[-1], draws(rates, ks[-1], 2, rng), 0, [5, 6])
    assert ks[900:1000].count(0) >= 98
    assert ks[2900:].count(5) >= 98


def test_goodput_changes_k_at_most_once_a_hold_and_only_for_a_margin():
    cost = table(lambda batch, k: 10 + k)
    policy, rng = GoodputPolicy(cost, hold_steps=20, probe_interval=0, memory=0.5), random.Random(3)
    changes, last = [], None
    for step in range(2000):
        k = policy.choose(3)
        if last is not None and k != last:
            changes.append(step)
        last = k
        policy.observe(k, draws([rng.random()] * 5, k, 3, rng))
    assert len(changes) > 3
    assert all(b - a > 20 for a, b in pairwise(changes))
    stubborn = GoodputPolicy(cost, margin=10.0)
    first = stubborn.choose(1)
    for _ in range(100):
        stubborn.observe(5, [5])
    assert stubborn.choose(1) == first


def test_goodput_knows_requests_apart():
    """A batch of two that accept everything and then of two that accept nothing: the change is seen at once."""
    policy, rng = GoodputPolicy(table(lambda batch, k: 10 + 2 * k), hold_steps=0, probe_interval=0), random.Random(4)
    rates = {1: [0.97] * 5, 2: [0.97] * 5, 3: [0.03] * 5, 4: [0.03] * 5}
    for _ in range(400):
        k = policy.choose(4, None, [1, 2, 3, 4])
        policy.observe(max(k, 1), [draws(rates[r], max(k, 1), 1, rng)[0] for r in (1, 2, 3, 4)], 0, [1, 2, 3, 4])
    good, bad = policy_from_dict(policy.to_dict()), policy_from_dict(policy.to_dict())
    assert good.choose(2, None, [2, 1]) == 5
    assert bad.choose(2, None, [3, 4]) == 0


def test_goodput_forgets_requests_that_are_gone():
    policy = GoodputPolicy(table())
    for first in range(0, 5000, 5):
        requests = list(range(first, first + 16))
        policy.observe(policy.choose(16, None, requests), [1] * 16, 1, requests)
    assert len(json.dumps(policy.to_dict())) < 10_000
    policy.observe(3, [3], 1, [0])  # a request that is long gone
    assert policy.choose(1, None, [999_999]) in KS


def test_goodput_of_no_drafts_at_all():
    policy = GoodputPolicy(table(), ks=[0])
    assert policy.choose(3, 10, [1, 2, 3]) == 0
    policy.observe(0, [0, 0, 0], 0, [1, 2, 3])


# -- the bandit


def test_bandit_plays_every_arm_then_mostly_the_best():
    cost, rng = table(lambda batch, k: 10 + k), random.Random(5)
    truth = [0.6] * 5
    value = [sum(0.6**j for j in range(k + 1)) / cost.step_ms(2, k) for k in KS]
    policy, regret, ks = BanditPolicy(cost), [], []
    for _ in range(20_000):
        ks.append(policy.choose(2))
        regret.append(max(value) - value[ks[-1]])
        policy.observe(ks[-1], draws(truth, ks[-1], 2, rng))
    assert set(ks[: 6 * 8]) == set(KS)
    early, late = np.mean(regret[:2000]), np.mean(regret[-2000:])
    assert late < 0.35 * early
    assert late < 0.01 * max(value)


def test_bandit_holds_its_arm_and_keeps_batches_apart():
    policy = BanditPolicy(table(), hold_steps=5)
    ks = []
    for _ in range(60):
        ks.append(policy.choose(1))
        policy.observe(ks[-1], [0])
    changes = [i for i in range(1, 60) if ks[i] != ks[i - 1]]
    assert all(change % 5 == 0 for change in changes)
    assert policy.choose(16) == 0  # an octave never played begins anew


# -- all of them


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


# -- the cost table


def test_cost_between_and_beyond_what_was_measured():
    rows = [{"batch": n, "k": 1, "context": c, "step_ms": n + c / 100} for n in (1, 5) for c in (100, 300)]
    cost = CostTable([*rows, {"batch": 2, "k": 0, "context": 100, "step_ms": 7.0}])
    assert cost.step_ms(3, 1, 200) == pytest.approx(5.0)
    assert cost.step_ms(9, 1, 500) == pytest.approx(14.0)
    assert cost.step_ms(1, 1, 5) == pytest.approx(2.0)
    assert cost.step_ms(4, 1) == pytest.approx(5.0)
    assert cost.step_ms(40, 0, 900) == 7.0
    falling = CostTable({"batch": n, "k": 0, "context": 0, "step_ms": 10 - n} for n in (1, 2))
    assert falling.step_ms(100, 0) == 8


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "has no rows"),
        ({"batch": 1}, "the cost table is .*; it must be a list of rows"),
        ([{"batch": 1, "k": 0, "context": 0, "step_ms": 10**400}], "step_ms in row 0 of the cost table is 1000"),
        ([{"batch": 10**400, "k": 0, "context": 0, "step_ms": 1}], "batch in row 0 of the cost table is 1000"),
        ([3], "row 0 of the cost table is 3; it must have batch, k, context, step_ms"),
        ([{"batch": 0, "k": 0, "context": 0, "step_ms": 1}], "batch in row 0"),
        ([{"batch": 1, "k": 0, "context": 0, "step_ms": 0}], "step_ms in row 0 of the cost table is 0"),
        ([{"batch": 1, "k": 0, "context": 0, "step_ms": float("nan")}], "must be a positive number"),
        ([{"batch": 1, "k": 0, "context": 0, "step_ms": 1}] * 2, "row 1 of the cost table is the second"),
    ],
)
def test_cost_rows_are_checked(rows, reason):
    with pytest.raises(ValueError, match=reason):
        CostTable(rows)


def test_cost_of_an_unmeasured_k():
    with pytest.raises(ValueError, match="k is 9; the cost table has 0, 1, 2, 3, 4, 5"):
        table().step_ms(1, 9)


@pytest.mark.parametrize("content", ["", "{}", '{"schema": "stepgraph.profile/1", "rows": {}}'])
def test_damaged_profiles_are_named(tmp_path, content):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ValueError, match=r"profile p\.json"):
        CostTable.load(tmp_path / "p.json")


def test_plans_of_one_k_each_make_one_table(tmp_path, capsys):
    paths = []
    for k in (0, 2):
        paths.append(str(tmp_path / f"plan{k}.json"))
        plan = ["plan", "--model", "tiny-llama", "--max-batch", "2", "--k", str(k), "--context", "100", "--json", paths[-1]]
        assert main(plan) == 0
    cost = CostTable.load(*paths)
    keys = [key for path in paths for key in json.loads(Path(path).read_text())["keys"]]
    for key in keys:
        assert cost.step_ms(key["batch"], key["k"], 100) == pytest.approx(key["modes"]["full_us"] / 1e3)
    assert main(["simulate", "--cost", paths[0], "--cost", paths[1], "--steps", "20"]) == 0
    with pytest.raises(ValueError, match=r"plan0\.json: row 2 of the cost table is the second"):
        CostTable.load(paths[0], paths[0])
    Path(paths[0]).write_text('{"keys": [{"batch": 1}], "assumptions": {"context_tokens": 1}}')
    with pytest.raises(ValueError, match=r"plan plan0\.json has no 'k' for a key"):
        CostTable.load(paths[0])
