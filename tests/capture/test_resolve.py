"""Modes and sizes from what was asked for and what the components can do; the v1 baseline beside it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.capture.keys import GraphKey
from stepgraph.capture.resolve import ENGINE_SIZES, CaptureMode, resolve_capture_mode_and_sizes
from stepgraph.capture.schedule import Schedule
from stepgraph.kernels.attention import CAPTURE_SUPPORT
from stepgraph.kernels.support import CaptureSupport
from stepgraph.model.drafters import Drafter

NONE, PIECEWISE, FULL = CaptureMode.NONE, CaptureMode.PIECEWISE, CaptureMode.FULL
PUBLISHED = Schedule.parse([[1, 16, 5], [17, 32, 4], [33, 64, 3], [65, 128, 1], [129, 512, 0]])


def resolve(mode="FULL", target="ALWAYS", *, schedule=None, k_max=2, max_batch=8, drafter=None, **options):
    support = {"target": CaptureSupport[target]}
    if drafter is not None:
        support["drafter"] = CaptureSupport[drafter]
    return resolve_capture_mode_and_sizes(mode, support, schedule, k_max, max_batch, **options)


@pytest.mark.parametrize(
    ("mode", "target", "decode", "prefill"),
    [
        # what was asked for, what can be had -> decode at k = 0, 1, 2, and prefill
        ("NONE", "ALWAYS", [NONE] * 3, NONE),
        ("NONE", "NEVER", [NONE] * 3, NONE),
        ("PIECEWISE", "ALWAYS", [PIECEWISE] * 3, PIECEWISE),
        ("PIECEWISE", "NEVER", [PIECEWISE] * 3, PIECEWISE),
        ("FULL", "ALWAYS", [FULL] * 3, FULL),
        ("FULL", "UNIFORM_BATCH", [FULL] * 3, PIECEWISE),
        ("FULL", "UNIFORM_SINGLE_TOKEN", [FULL, PIECEWISE, PIECEWISE], PIECEWISE),
        ("FULL", "NEVER", [PIECEWISE] * 3, PIECEWISE),
        ("FULL_DECODE_ONLY", "ALWAYS", [FULL] * 3, NONE),
        ("FULL_DECODE_ONLY", "UNIFORM_BATCH", [FULL] * 3, NONE),
        ("FULL_DECODE_ONLY", "UNIFORM_SINGLE_TOKEN", [FULL, NONE, NONE], NONE),
        ("FULL_DECODE_ONLY", "NEVER", [NONE] * 3, NONE),
        ("FULL_AND_PIECEWISE", "ALWAYS", [FULL] * 3, PIECEWISE),
        ("FULL_AND_PIECEWISE", "UNIFORM_BATCH", [FULL] * 3, PIECEWISE),
        ("FULL_AND_PIECEWISE", "UNIFORM_SINGLE_TOKEN", [FULL, PIECEWISE, PIECEWISE], PIECEWISE),
        ("FULL_AND_PIECEWISE", "NEVER", [PIECEWISE] * 3, PIECEWISE),
    ],
)
def test_table(mode, target, decode, prefill):
    resolved = resolve(mode, target, prefill_sizes=[64, 16])
    component = resolved.components["target"]
    assert list(component.decode.values()) == decode
    assert component.prefill is prefill
    assert component.prefill_sizes == (() if prefill is NONE else (16, 64))
    wanted = CaptureMode(mode).parts
    less = [k for k in range(3) if component.decode[k] is not wanted[0]] or prefill is not wanted[1]
    assert bool(resolved.reasons) == bool(less)
    for n in range(1, 9):
        for k in range(3):
            found, key = component.lookup(n, k)
            assert found is decode[k]
            assert (key is None) == (found is NONE)
            assert key is None or (key.k == k and key.batch >= n)


def test_reasons_name_component_k_and_support():
    resolved = resolve("FULL", "UNIFORM_SINGLE_TOKEN")
    assert resolved.reasons == (
        "target: decode at k = 1, 2 is PIECEWISE instead of FULL, since its support is UNIFORM_SINGLE_TOKEN and the query has "
        "more than one token",
        "target: prefill is PIECEWISE instead of FULL, since its support is UNIFORM_SINGLE_TOKEN, not ALWAYS",
    )
    assert resolve("FULL_DECODE_ONLY", "NEVER").reasons == (
        "target: decode at every k is NONE instead of FULL, since its support is NEVER",
    )


@pytest.mark.parametrize("drafter", [member.name for member in CaptureSupport])
def test_a_weak_drafter_takes_nothing_from_the_target(drafter):
    both, alone = resolve(drafter=drafter), resolve()
    assert both.components["target"] == alone.components["target"]
    assert all(reason.startswith("drafter: ") for reason in both.reasons)
    assert bool(both.reasons) == (drafter != "ALWAYS")


def test_decode_and_prefill_sizes_are_independent():
    component = resolve(decode_sizes=[2, 8], prefill_sizes=[7, 100]).components["target"]
    assert component.prefill_sizes == (7, 100)
    assert component.full_keys.buckets(1) == (2, 8)
    assert resolve(decode_sizes=[2, 8]).components["target"].full_keys == component.full_keys
    assert resolve(prefill_sizes=[3]).components["target"].full_keys.buckets(2) == (1, 2, 3, 4, 5, 6, 7, 8)


@settings(max_examples=40, deadline=None)
@given(
    max_batch=st.integers(1, 40),
    entries=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 7)), min_size=1, max_size=5),
    sizes=st.none() | st.lists(st.integers(1, 60), min_size=1, max_size=6),
)
def test_v2_full_covers_every_batch_and_k(max_batch, entries, sizes):
    ranges, first = [], 1
    for length, k in entries:
        ranges.append([first, first + length - 1, k])
        first += length
    for schedule in (Schedule.parse(ranges), None):
        resolved = resolve("FULL_DECODE_ONLY", schedule=schedule, k_max=7, max_batch=max_batch, decode_sizes=sizes)
        target = resolved.components["target"]
        assert resolved.slower_batches(schedule, 7, max_batch) == 0
        for n in range(1, max_batch + 1):
            for k in range(8) if schedule is None else [schedule.k_for(n)]:
                mode, key = target.lookup(n, k)
                assert mode is FULL
                assert key.batch >= n
        assert all(key.batch <= max_batch for key in target.full_keys)


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_count_that_is_no_multiple_selects_no_uniform_graph(runner, k):
    target = resolve(schedule=Schedule.fixed(k), runner=runner, max_batch=64).components["target"]
    for tokens in range(1, 200):
        mode, key = target.lookup_tokens(tokens, k)
        if tokens % (k + 1):
            assert (mode, key) == (NONE, None)
        elif key is not None:
            assert key.batch >= tokens // (k + 1)  # padded up to a bucket, never cut


def test_v1_rounds_to_whole_requests_of_the_largest_query_length():
    target = resolve(schedule=Schedule.fixed(2), runner="v1", max_batch=8).components["target"]
    # 1, 2, 4, 8, 16, 24, … tokens -> 3, 3, 6, 9, 18, 24 tokens = 1, 1, 2, 3, 6, 8 requests
    assert target.full_keys.buckets(2) == (1, 2, 3, 6, 8)
    sharded = resolve(schedule=Schedule.fixed(2), runner="v1", max_batch=8, tensor_parallel_size=2).components["target"]
    assert sharded.full_keys.buckets(2) == (2, 4, 6, 8)  # multiples of 6 tokens
    assert resolve(tensor_parallel_size=2).components == resolve().components


def test_v1_falls_to_piecewise_where_k_may_change():
    resolved = resolve("FULL_AND_PIECEWISE", schedule=PUBLISHED, k_max=5, max_batch=256, runner="v1")
    target = resolved.components["target"]
    assert set(target.decode.values()) == {PIECEWISE}
    assert len(target.full_keys) == 0
    assert resolved.slower_batches(PUBLISHED, 5, 256) == 256
    assert "k may change (it takes 0, 1, 3, 4, 5) and v1 has graphs for one query length" in resolved.reasons[0]
    assert target.lookup(16, 5) == (PIECEWISE, GraphKey(16, 5))


def test_v1_leaves_large_batches_to_a_slower_path():
    """At a fixed k = 5 and max batch 256, the largest size below 1,024 tokens is 1,008: 168 whole requests, so batches 169 to
    256 have no full graph. (The published 86 are of a later runner: tests/capture/test_published_engine.py.)
    """
    schedule = Schedule.fixed(5)
    resolved = resolve("FULL_AND_PIECEWISE", schedule=schedule, k_max=5, max_batch=256, runner="v1")
    assert max(ENGINE_SIZES) == 1024
    assert resolved.slower_batches(schedule, 5, 256) == 256 - 1008 // 6
    assert resolve("FULL_AND_PIECEWISE", schedule=schedule, k_max=5, max_batch=256).slower_batches(schedule, 5, 256) == 0


def test_published_schedule_in_v2():
    target = resolve("FULL_DECODE_ONLY", schedule=PUBLISHED, k_max=5, max_batch=256).components["target"]
    assert len(target.full_keys) == 36


def test_declared_support():
    assert CAPTURE_SUPPORT is CaptureSupport.UNIFORM_BATCH
    assert Drafter.capture_support is CaptureSupport.UNIFORM_BATCH


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "HALF"}, "requested_mode is 'HALF'; allowed are NONE, PIECEWISE, FULL"),
        ({"runner": "v3"}, "runner is 'v3'; allowed are v1, v2"),
        ({"k_max": -1}, "k_max is -1"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
        ({"decode_sizes": [0]}, "an entry of decode_sizes is 0"),
        ({"decode_sizes": "12"}, "decode_sizes is '12'"),
        ({"prefill_sizes": [True]}, "an entry of prefill_sizes is True"),
        ({"schedule": Schedule.fixed(5)}, "the schedule asks for k=5; k_max is 2"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        resolve(**options)


@pytest.mark.parametrize("support", [{}, {"drafter": CaptureSupport.ALWAYS}, None, {"target": "SOMETIMES"}])
def test_bad_support(support):
    with pytest.raises(ValueError, match="support"):
        resolve_capture_mode_and_sizes("FULL", support, None, 2, 8)
