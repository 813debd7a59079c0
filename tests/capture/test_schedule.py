"""Schedules: vLLM's meaning, read strictly (case 41)."""

import dataclasses
import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.capture.schedule import MAX_BYTES, SCHEDULE_KEY, Schedule, ScheduleError

GAPS = [[1, 4, 5], [5, 16, 3], [32, 64, 1]]


@st.composite
def entries(draw, most_batch=80):
    """A legal `[[first, last, k], …]`, with gaps."""
    bounds = draw(st.lists(st.integers(2, most_batch), min_size=1, max_size=10, unique=True).map(sorted))
    bounds = [1, *bounds][: (len(bounds) + 1) // 2 * 2]
    return [[first, last, draw(st.integers(0, 16))] for first, last in zip(bounds[::2], bounds[1::2], strict=True)]


def brute_force_k(schedule, batch):
    """Carry-forward read off the documentation: walk up from batch size 1 and keep the last k that was set."""
    k = None
    for n in range(1, batch + 1):
        for first, last, value in schedule:
            if first <= n <= last:
                k = value
    return k


def test_case_41_gaps_and_tail_carry_the_previous_k():
    schedule = Schedule.parse(GAPS)
    assert [schedule.k_for(n) for n in (1, 4, 5, 16)] == [5, 5, 3, 3]
    assert {schedule.k_for(n) for n in range(17, 32)} == {3}
    assert {schedule.k_for(n) for n in (32, 64, 65, 10_000)} == {1}
    assert schedule.ranges(100) == ((1, 4, 5), (5, 31, 3), (32, 100, 1))
    assert schedule.ranges(20) == ((1, 4, 5), (5, 20, 3))
    assert schedule.ks() == {5, 3, 1}
    assert schedule.ks(20) == {5, 3}


@settings(deadline=None)
@given(entries(), st.integers(1, 100))
def test_carry_forward_equals_brute_force(schedule, max_batch):
    parsed = Schedule.parse(schedule)
    expected = [brute_force_k(schedule, n) for n in range(1, max_batch + 1)]
    assert [parsed.k_for(n) for n in range(1, max_batch + 1)] == expected
    ranges = parsed.ranges(max_batch)
    assert [k for first, last, k in ranges for _ in range(first, last + 1)] == expected
    assert all(left[2] != right[2] for left, right in pairwise(ranges))
    assert parsed.ks(max_batch) == set(expected)


@settings(deadline=None)
@given(entries())
def test_round_trips(schedule):
    parsed = Schedule.parse(schedule)
    assert parsed.to_list() == schedule
    assert Schedule.load(parsed.to_json()) == parsed == Schedule.parse(json.loads(parsed.to_json()))
    assert Schedule.parse({SCHEDULE_KEY: schedule, "method": "eagle"}) == parsed
    assert Schedule.parse(Schedule(tuple(map(tuple, schedule)))) == parsed


def test_sources(tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps({"speculative_config": {SCHEDULE_KEY: GAPS, "num_speculative_tokens": 5}}))
    assert Schedule.load(path) == Schedule.load(str(path)) == Schedule.parse(GAPS)
    assert Schedule.load("  " + json.dumps(GAPS)) == Schedule.parse(GAPS)
    assert {Schedule.fixed(3).k_for(n) for n in (1, 7, 999)} == {3}


def test_frozen_and_hashable():
    schedule = Schedule.fixed(2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.entries = ()
    assert len({schedule, Schedule.parse([[1, 1, 2]])}) == 1


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ([[1, 4, 17]], ["entry 1", "k is 17", "0 to 16"]),
        ([[1, 4, 3.9]], ["entry 1", "k is 3.9"]),
        ([[1, 4, 3.0]], ["k is 3.0"]),
        ([[1, 4, True]], ["k is True"]),
        ([[True, 4, 3]], ["first is True"]),
        ([[1, 4, "3"]], ["k is '3'"]),
        ([["1", 4, 3]], ["first is '1'"]),
        ([[1, 4, None]], ["k is None"]),
        ([[1, 4, float("nan")]], ["k is nan"]),
        ([[1, 4, -1]], ["k is -1"]),
        ([[1, 4, 5], [4, 8, 3]], ["entry 2", "first is 4", "above 4"]),
        ([[1, 4, 5], [1, 4, 3]], ["entry 2", "first is 1"]),
        ([[5, 8, 3], [1, 4, 5]], ["entry 1", "first is 5", "start at batch size 1"]),
        ([[1, 4, 5], [9, 12, 1], [5, 8, 3]], ["entry 3", "first is 5", "above 12"]),
        ([[2, 4, 5]], ["entry 1", "first is 2"]),
        ([[0, 4, 5]], ["entry 1", "first is 0", "at least 1"]),
        ([[1, 0, 5]], ["last is 0"]),
        ([[1, 4, 5], [9, 8, 3]], ["entry 2", "first is 9", "at most last, 8"]),
        ([], ["[]", "non-empty list"]),
        ([[]], ["entry 1", "three integers"]),
        ([[1, 4]], ["entry 1", "three integers"]),
        ([[1, 4, 1, 8, 3]], ["entry 1", "three integers"]),
        ([1, 4, 5], ["entry 1 (1)", "three integers"]),
        (["1-4"], ["entry 1 ('1-4')"]),
        ([{"1-4": 5}], ["entry 1"]),
        ("[[1, 4, 5]]", ["must be a non-empty list"]),
        (None, ["None"]),
        (3, ["3"]),
        ({}, [SCHEDULE_KEY]),
        ({SCHEDULE_KEY: {"1-16": 3}}, ["1-16", "non-empty list"]),
        ({SCHEDULE_KEY: None}, ["None"]),
        ({SCHEDULE_KEY: [[1, 4, 5]], "num_speculative_tokens": 3}, ["k is 5", "0 to 3"]),
        ({SCHEDULE_KEY: [[1, 4, 5]], "num_speculative_tokens": "5"}, ["num_speculative_tokens is '5'"]),
        ([[1, 4, 10**5000]], ["enormous int"]),
    ],
)
def test_case_41_refuses_with_one_sentence(value, names):
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(value)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 250
    for name in names:
        assert name in message
    assert isinstance(caught.value, ValueError)


def test_case_41_max_k_is_an_argument():
    assert Schedule.parse([[1, 4, 20]], max_k=32).k_for(1) == 20
    with pytest.raises(ScheduleError, match="k is 5; it must be an integer from 0 to 4"):
        Schedule.parse([[1, 4, 5]], max_k=4)
    with pytest.raises(ScheduleError):
        Schedule.parse(Schedule.fixed(5), max_k=4)
    with pytest.raises(ScheduleError):
        Schedule.fixed(17)
    with pytest.raises(ValueError, match="max_k"):
        Schedule.parse(GAPS, max_k=True)


def test_case_41_unusable_sources(tmp_path):
    huge = tmp_path / "huge.json"
    huge.write_text("[" + " " * MAX_BYTES + "]")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00[")
    broken = tmp_path / "broken.json"
    broken.write_text("[[1, 4, 5]")
    for source, reason in [
        (huge, "larger than"),
        ("[" + " " * MAX_BYTES + "]", "larger than"),
        (binary, "UTF-8"),
        (broken, "not valid JSON"),
        ("[[1, 4, 5]", "not valid JSON"),
        ("[" * 50_000, "nested too deeply"),
        ("[[1, 4, " + "9" * 5000 + "]]", "not valid JSON"),
        (tmp_path / "absent.json", "does not exist"),
        (tmp_path, "not a regular file"),
        ("", "not a regular file"),
        ("5", "does not exist"),
        ("a\0b", "exist|read"),
        ("x" * 5000, "exist|read"),
        (7, "not 7"),
        (None, "not None"),
        (b"[[1, 4, 5]]", "path"),
    ]:
        with pytest.raises(ScheduleError, match=reason) as caught:
            Schedule.load(source)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("batch", [0, -1, True, 1.0, "1", None])
def test_batch_is_checked(batch):
    with pytest.raises(ValueError, match="batch is"):
        Schedule.fixed(1).k_for(batch)
    with pytest.raises(ValueError, match="max_batch is"):
        Schedule.fixed(1).ranges(batch)
