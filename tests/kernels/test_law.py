"""The law laboratory: exact output laws of both verification methods, and its closed forms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.rejection.law import (
    METHODS,
    chi_square,
    emitted_law,
    expected_accepted,
    iid,
    target_law,
    total_variation,
    verify,
)


def random_model(vocab: int, seed: int, zeros: bool = False):
    """A law of its own for every prefix; with `zeros`, some tokens are impossible."""

    def law(prefix):
        rng = np.random.default_rng([seed, vocab, *prefix])
        weights = rng.gamma(0.6, size=vocab) + 1e-3
        if zeros:
            weights[rng.integers(vocab)] = 0.0
        return weights / weights.sum()

    return law


TARGET, DRAFT = iid([1 / 3, 2 / 3]), iid([2 / 3, 1 / 3])


@pytest.mark.parametrize(("k", "standard", "block"), [(1, 2 / 3, 2 / 3), (2, 10 / 9, 11 / 9), (3, 38 / 27, 5 / 3)])
def test_expected_acceptance(k, standard, block):
    """Case 3, in closed form and by enumeration."""
    for method, expected in (("standard", standard), ("block", block)):
        assert expected_accepted(TARGET, DRAFT, k, method) == pytest.approx(expected, abs=1e-14)
        _, lengths = emitted_law(TARGET, DRAFT, k, method)
        assert lengths @ np.arange(k + 1) == pytest.approx(expected, abs=1e-14)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=25, deadline=None)
@given(vocab=st.integers(2, 3), k=st.integers(0, 3), seed=st.integers(0, 2**31), zeros=st.booleans())
def test_the_emitted_law_is_the_targets(method, vocab, k, seed, zeros):
    target, draft = random_model(vocab, seed, zeros), random_model(vocab, seed + 1, zeros)
    joint, lengths = emitted_law(target, draft, k, method)
    assert total_variation(joint, target_law(target, k + 1)) < 1e-12
    assert lengths.sum() == pytest.approx(1, abs=1e-12)
    assert lengths @ np.arange(k + 1) == pytest.approx(expected_accepted(target, draft, k, method), abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(vocab=st.integers(2, 4), k=st.integers(1, 3), seed=st.integers(0, 2**31))
def test_block_accepts_at_least_as_much(vocab, k, seed):
    target, draft = random_model(vocab, seed), random_model(vocab, seed + 1)
    standard, block = (expected_accepted(target, draft, k, method) for method in METHODS)
    assert block >= standard - 1e-12
    if k == 1:
        assert block == pytest.approx(standard, abs=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_like_the_target_is_always_accepted(method):
    same = random_model(3, 5)
    _, lengths = emitted_law(same, same, 3, method)
    assert lengths[3] == pytest.approx(1, abs=1e-12)


def test_disjoint_supports_reject_at_once():
    for method in METHODS:
        _, lengths = emitted_law(iid([0.5, 0.5, 0, 0]), iid([0, 0, 0.4, 0.6]), 2, method)
        assert lengths.tolist() == [1, 0, 0]


def test_a_wrong_residual_is_seen():
    """The enumeration has power: the residual with p and q swapped is far from lossless."""
    target, draft = random_model(3, 1), random_model(3, 2)
    biased = np.zeros(3)
    for token in range(3):
        outcome = verify(target, draft, (token,))
        mass = draft(())[token]
        biased[token] += mass * outcome.accepted[1]
        wrong = np.maximum(draft(()) - target(()), 0)
        biased += mass * outcome.accepted[0] * wrong / wrong.sum()
    assert total_variation(biased, target(())) > 0.1


def test_helpers():
    assert total_variation([1, 0], [0, 1]) == 1
    assert chi_square([50, 50], [0.5, 0.5]) == (0.0, 1)
    assert chi_square([60, 40], [0.5, 0.5]) == (4.0, 1)
    assert chi_square([1, 0, 1], [0.5, 0.5, 0])[0] == float("inf")
    with pytest.raises(ValueError, match="method is 'greedy'; allowed are standard, block"):
        verify(TARGET, DRAFT, (0,), "greedy")
