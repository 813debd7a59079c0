"""Graph keys: every (n, k) that may be asked for reaches the cheapest captured graph (case 16)."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.capture.keys import MAX_BATCH, GraphKey, KeySet, default_rungs, reachable_keys
from stepgraph.capture.schedule import Schedule

PUBLISHED = Schedule.parse([[1, 16, 5], [17, 32, 4], [33, 64, 3], [65, 128, 1], [129, 512, 0]])

pair_sets = st.sets(st.tuples(st.integers(1, 60), st.integers(0, 6)), max_size=60)
rung_sets = st.none() | st.sets(st.integers(1, 80), min_size=1, max_size=12).map(sorted)


def assert_cheapest(keys, n, k):
    """`lookup(n, k)` is what an exhaustive search over the captured keys finds."""
    found = keys.lookup(n, k)
    assert found == min((key for key in keys if key.k == k and key.batch >= n), default=None)
    return found


@pytest.mark.parametrize("max_batch", [1, 3, 20, 42, 100, 250, 256])
def test_case_16_every_batch_of_the_published_schedule_is_covered(max_batch):
    keys = reachable_keys(PUBLISHED, max_batch)
    for n in range(1, max_batch + 1):
        k = PUBLISHED.k_for(n)
        found = assert_cheapest(keys, n, k)
        assert found.k == k
        assert n <= found.batch <= max_batch
    assert keys.padding(PUBLISHED, max_batch).misses == ()
    assert {GraphKey(last, k) for _, last, k in PUBLISHED.ranges(max_batch)} <= set(keys)


def test_case_16_published_schedule_needs_36_graphs():
    keys = reachable_keys(PUBLISHED, 256)
    padding = keys.padding(PUBLISHED, 256)
    assert len(keys) == 36
    assert padding.mean == pytest.approx(0.045, abs=5e-4)
    assert padding.worst == pytest.approx(7 / 33)
    assert padding.worst_at == (33, 3)
    assert keys.buckets(3) == (40, 48, 56, 64)
    assert keys.ks == {0, 1, 3, 4, 5}


@settings(deadline=None)
@given(pair_sets, rung_sets)
def test_every_reachable_pair_has_the_cheapest_key_and_no_key_is_spare(pairs, rungs):
    keys = reachable_keys(pairs, 60, rungs)
    used = set()
    for n, k in pairs:
        found = assert_cheapest(keys, n, k)
        assert found is not None
        used.add(found)
    assert used == set(keys)
    padding = keys.padding(pairs, 60)
    assert padding.misses == ()
    assert 0 <= padding.mean <= padding.worst


@settings(deadline=None)
@given(pair_sets, pair_sets, rung_sets)
def test_held_pairs_are_covered_with_bounded_padding_under_default_rungs(pairs, held, rungs):
    keys = reachable_keys(pairs, 60, rungs, held)
    assert set(reachable_keys(pairs, 60, rungs)) <= set(keys)
    for n, k in pairs | held:
        found = assert_cheapest(keys, n, k)
        assert found is not None
        if rungs is None:
            assert found.batch - n <= 0.5 * n


@settings(deadline=None)
@given(st.sets(st.integers(0, 8), min_size=1), st.integers(1, 150))
def test_for_policy_covers_the_whole_product(ks, max_batch):
    keys = KeySet.for_policy(ks, max_batch)
    assert keys.ks == ks
    for k in ks:
        assert keys.buckets(k) == default_rungs(max_batch)
        assert all(assert_cheapest(keys, n, k) for n in range(1, max_batch + 1))


def test_forms_of_reach_agree():
    by_batch = {n: [PUBLISHED.k_for(n)] for n in range(1, 101)}
    pairs = {(n, k) for n, ks in by_batch.items() for k in ks}
    assert reachable_keys(by_batch, 100) == reachable_keys(pairs, 100) == reachable_keys(PUBLISHED, 100)


def test_lookup_misses_are_none_and_counted():
    keys = KeySet([GraphKey(4, 2), GraphKey(8, 2), GraphKey(8, 2)])
    assert len(keys) == 2
    assert keys.lookup(5, 2) == GraphKey(8, 2)
    assert keys.lookup(9, 2) is None
    assert keys.lookup(1, 3) is None
    assert keys.buckets(3) == ()
    assert keys.padding({(3, 2), (9, 2), (1, 3)}, 16).misses == ((1, 3), (9, 2))
    assert GraphKey(8, 2) in keys
    assert GraphKey(6, 2) not in keys
    assert list(KeySet([])) == []
    for n in (0, -1):
        with pytest.raises(ValueError, match=f"batch is {n}"):
            keys.lookup(n, 2)


@settings(deadline=None)
@given(st.integers(1, 5000))
def test_default_rungs_pad_little(max_batch):
    rungs = default_rungs(max_batch)
    assert rungs[-1] == max_batch
    assert list(rungs) == sorted(set(rungs))
    for lower, upper in pairwise(rungs):
        worst = (upper - lower - 1) / (lower + 1)
        assert worst < (1 / 8 if lower >= 64 else 1 / 4)


def test_default_rungs_are_dense_where_batches_are_small():
    rungs = default_rungs(256)
    assert rungs[:19] == (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56)
    assert rungs[-9:] == (128, 144, 160, 176, 192, 208, 224, 240, 256)


def test_keys_are_ordered_and_checked():
    assert sorted([GraphKey(2, 0), GraphKey(1, 5), GraphKey(2, 3)])[-1] == GraphKey(2, 3)
    assert GraphKey(2, 3).query_len == 4
    for batch, k in [(0, 1), (True, 1), (1.0, 1), (1, -1), (1, True), ("1", 1)]:
        with pytest.raises(ValueError, match="must be an integer"):
            GraphKey(batch, k)


@pytest.mark.parametrize("max_batch", [0, -1, True, 4.0, "4", None, MAX_BATCH + 1])
def test_max_batch_is_checked(max_batch):
    for build in (
        lambda: default_rungs(max_batch),
        lambda: reachable_keys(PUBLISHED, max_batch),
        lambda: KeySet.for_policy([1], max_batch),
    ):
        with pytest.raises(ValueError, match="max_batch is"):
            build()


@pytest.mark.parametrize("rungs", [[], [4, 2], [2, 2], [0, 4], [True, 4], [1.0], ["4"]])
def test_rungs_are_checked(rungs):
    with pytest.raises(ValueError, match="rung"):
        reachable_keys(PUBLISHED, 8, rungs)


@pytest.mark.parametrize("pair", [(0, 1), (9, 1), (1, -1), (True, 1), (1, 1.5)])
def test_pairs_are_checked(pair):
    with pytest.raises(ValueError, match="must be an integer"):
        reachable_keys([pair], 8)
