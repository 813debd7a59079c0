"""Goodput: acceptance by position, by hand and found, and the k that follows from it."""

import json
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import KS, draws, table

from stepgraph.capture.policies import GoodputPolicy, policy_from_dict
from stepgraph.capture.policies.adaptive import PositionRates, RequestRates, expected_tokens


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
