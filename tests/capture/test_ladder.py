"""The ladder: its rule at the thresholds and step by step."""

import pytest

from stepgraph.capture.policies import LadderPolicy
from stepgraph.capture.policies.ladder import Rungs


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
