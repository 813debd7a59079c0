"""Policies: hysteresis (case 42), the reachable set, and saved state."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.capture.policies import FixedPolicy, KPolicy, SchedulePolicy, make_policy, policy_from_dict
from stepgraph.capture.schedule import Schedule, ScheduleError

PUBLISHED = [[1, 16, 5], [17, 32, 4], [33, 64, 3], [65, 128, 1], [129, 512, 0]]

schedules = st.dictionaries(st.integers(2, 60), st.integers(0, 6), max_size=5).map(
    lambda starts: Schedule.parse([[first, first, k] for first, k in sorted({1: 4, **starts}.items())])
)
batches = st.lists(st.integers(1, 60), min_size=1, max_size=120)


def change_steps(ks):
    return [step for step in range(1, len(ks)) if ks[step] != ks[step - 1]]


@pytest.mark.parametrize("hold_steps", [1, 2, 7, 8, 50])
def test_case_42_flutter_over_a_threshold_changes_k_at_most_once_per_hold(hold_steps):
    policy = make_policy(schedule=[[1, 4, 5], [5, 16, 3]], hold_steps=hold_steps)
    changes = change_steps([policy.choose(4 + step % 2) for step in range(400)])
    assert changes
    assert all(later - earlier >= hold_steps for earlier, later in pairwise(changes))


def test_case_42_default_holds_eight_steps_and_zero_is_off():
    alternating = [4, 5] * 20
    held = make_policy(schedule=[[1, 4, 5], [5, 16, 3]])
    assert [held.choose(n) for n in alternating[:11]] == [5, *[3] * 9, 5]
    exact = make_policy(schedule=[[1, 4, 5], [5, 16, 3]], hold_steps=0)
    assert [exact.choose(n) for n in alternating] == [5, 3] * 20


def test_a_batch_that_moves_on_changes_k_at_once():
    policy = make_policy(schedule=PUBLISHED)
    assert [policy.choose(n) for n in (1, 20, 40, 100, 200, 1, 256)] == [5, 4, 3, 1, 0, 5, 0]
    # 120 is within 128 // 8 of the threshold at 129 and is held; 112 is not.
    assert [policy.choose(n) for n in (120, 112)] == [0, 1]


@settings(deadline=None)
@given(schedules, batches, st.integers(1, 10))
def test_k_is_the_schedules_own_once_the_hold_is_over(schedule, sequence, hold_steps):
    policy = SchedulePolicy(schedule, hold_steps)
    for n in sequence:
        policy.choose(n)
    settled = [policy.choose(sequence[-1]) for _ in range(hold_steps + 1)]
    assert settled[-1] == schedule.k_for(sequence[-1])


@settings(deadline=None)
@given(schedules, batches, st.integers(0, 10))
def test_every_choice_is_reachable_and_captured(schedule, sequence, hold_steps):
    policy = SchedulePolicy(schedule, hold_steps)
    max_batch = max(sequence)
    reachable, keys = policy.reachable(max_batch), policy.keys(max_batch)
    for n in sequence:
        k = policy.choose(n)
        assert (n, k) in reachable
        assert keys.lookup(n, k).batch <= max_batch
    assert keys.padding(reachable, max_batch).misses == ()
    assert all(k in policy.ks for _, k in reachable)
    assert {(n, schedule.k_for(n)) for n in range(1, max_batch + 1)} <= reachable


@pytest.mark.parametrize("max_batch", [1, 3, 20, 42, 100, 250, 256])
def test_hysteresis_costs_at_most_a_graph_per_threshold(max_batch):
    policy, exact = make_policy(schedule=PUBLISHED), make_policy(schedule=PUBLISHED, hold_steps=0)
    thresholds = len(policy.schedule.ranges(max_batch)) - 1
    assert len(policy.keys(max_batch)) <= len(exact.keys(max_batch)) + thresholds <= 40
    assert exact.keys(max_batch).padding(exact.reachable(max_batch), max_batch).worst <= 0.25
    # The schedule's own pairs keep their own buckets.
    assert policy.keys(max_batch).padding(policy.schedule, max_batch).mean <= 0.055


@pytest.mark.parametrize("hold_steps", [0, 8])
def test_nothing_is_called_reachable_that_is_not(hold_steps):
    schedule = Schedule.parse(PUBLISHED)
    seen = set()
    for start in range(1, 81):
        for n in range(1, 81):
            policy = SchedulePolicy(schedule, hold_steps)
            # Two starts, since the very first choice is not a change and holds nothing.
            k = [policy.choose(batch) for batch in (80 if start < 40 else 1, start, n)][-1]
            seen.add((n, k))
    assert seen == SchedulePolicy(schedule, hold_steps).reachable(80)


def test_fixed():
    policy = make_policy(k=3)
    assert isinstance(policy, FixedPolicy)
    assert policy.ks == {3}
    assert {policy.choose(n) for n in (1, 5, 1000)} == {3}
    policy.observe(3, [0, 3], lag=1)
    assert policy.reachable(3) == {(1, 3), (2, 3), (3, 3)}
    assert policy.keys(3).buckets(3) == (1, 2, 3)
    assert make_policy(k=0).ks == {0}


def test_both_keep_the_protocol():
    assert isinstance(make_policy(k=1), KPolicy)
    assert isinstance(make_policy(schedule=PUBLISHED), KPolicy)


@settings(deadline=None)
@given(schedules, batches, batches)
def test_saved_state_continues_the_same_run(schedule, before, after):
    policy = SchedulePolicy(schedule)
    for n in before:
        policy.choose(n)
    restored = policy_from_dict(json.loads(json.dumps(policy.to_dict())))
    assert [restored.choose(n) for n in after] == [policy.choose(n) for n in after]


def test_saved_fixed_policy_and_large_k_round_trip():
    policy = policy_from_dict(make_policy(k=20, max_k=32).to_dict())
    assert (policy.k, policy.max_k) == (20, 32)
    assert policy_from_dict(make_policy(schedule=[[1, 1, 20]], max_k=32).to_dict()).choose(1) == 20


def test_make_policy_reads_every_source(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(PUBLISHED))
    for source in (PUBLISHED, json.dumps(PUBLISHED), path, str(path), Schedule.parse(PUBLISHED)):
        assert make_policy(schedule=source).choose(33) == 3


def test_make_policy_needs_exactly_one():
    with pytest.raises(ValueError, match="both"):
        make_policy(k=3, schedule=PUBLISHED)
    with pytest.raises(ValueError, match="neither"):
        make_policy()


@pytest.mark.parametrize("k", [-1, 17, True, 3.0, "3"])
def test_k_is_checked(k):
    with pytest.raises(ValueError, match="; it must be an integer from 0 to 16"):
        make_policy(k=k)


def test_other_arguments_are_checked():
    with pytest.raises(ScheduleError, match="k is 5; it must be an integer from 0 to 4"):
        make_policy(schedule=[[1, 4, 5]], max_k=4)
    with pytest.raises(ValueError, match="hold_steps is -1"):
        make_policy(schedule=PUBLISHED, hold_steps=-1)
    with pytest.raises(ValueError, match="must be a Schedule"):
        SchedulePolicy(PUBLISHED)
    for policy in (make_policy(k=1), make_policy(schedule=PUBLISHED)):
        with pytest.raises(ValueError, match="batch is 0"):
            policy.choose(0)
        with pytest.raises(ValueError, match="max_batch is 0"):
            policy.reachable(0)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "kind is None"),
        ({"kind": "oracle"}, "kind is 'oracle'; it must be one of bandit, fixed, goodput, ladder, schedule"),
        ({"kind": ["fixed"]}, "kind is"),
        ({"kind": "fixed"}, "no 'k' entry"),
        ({**make_policy(schedule=PUBLISHED).to_dict(), "current": 5}, "current is 5"),
        ({**make_policy(schedule=PUBLISHED).to_dict(), "age": -1}, "age is -1"),
    ],
)
def test_unusable_saved_state(data, reason):
    with pytest.raises(ValueError, match=reason):
        policy_from_dict(data)
