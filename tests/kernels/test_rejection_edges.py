"""Rejection sampling at its edges: cornered inputs, wrong arguments, padding and support as properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rejection_cases import CASES, arguments, assert_valid

from stepgraph.kernels.registry import use_implementation
from stepgraph.kernels.rejection import rejection_sample, rejection_sample_reference
from stepgraph.kernels.sampling import draw, token_law


@pytest.mark.parametrize("name", CASES)
def test_cornered_inputs(name):
    """Cases 7, 8 and 11: the CPU decides as the specification does, and emits nothing that is not a token."""
    args = CASES[name]()
    copies = [None if arg is None else arg.clone() for arg in args]
    actual = rejection_sample(*args)
    assert_valid(args, *actual)
    with use_implementation("reference"):
        expected = rejection_sample(*args)
    for got, want in zip(actual, expected, strict=True):
        assert torch.equal(got, want)
    for arg, copy in zip(args, copies, strict=True):
        assert arg is None or arg.equal(copy) or arg.isnan().any()


def test_what_the_corners_emit():
    coldest = CASES["coldest"]()
    greedy = CASES["all greedy"]()
    greedy[:3] = coldest[:3]
    assert torch.equal(rejection_sample(*coldest)[0], rejection_sample(*greedy)[0])
    for name in ("least top-p", "min-p of one"):
        args = CASES[name]()
        emitted, accepted, _ = rejection_sample(*args)
        for row, count in enumerate(accepted.tolist()):
            assert emitted[row, : count + 1].tolist() == args[0][row, : count + 1].argmax(-1).tolist()
    assert rejection_sample(*CASES["every draft accepted"]())[1].tolist() == [3] * 3
    assert rejection_sample(*CASES["no draft accepted"]())[1].tolist() == [0] * 3
    assert (rejection_sample(*CASES["one token"]())[0] <= 0).all()


def test_the_widest_vocabulary():
    """V = 262,144: each filter decides as the specification does."""
    args = arguments(5, 1, 262_144, top_k=torch.tensor([0, 0, 50, 0, 300_000]))
    args[3] = torch.tensor([0.7, 0.5, 1.0, 0.0, 0.4])
    args[5] = torch.tensor([1.0, 0.9, 0.95, 1.0, 1.0])
    args[6] = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.02])
    actual = rejection_sample(*args)
    assert_valid(args, *actual)
    with use_implementation("reference"):
        for got, want in zip(actual, rejection_sample(*args), strict=True):
            assert torch.equal(got, want)


rows = st.tuples(
    st.lists(st.integers(-2, 6), min_size=2, max_size=2),  # drafts; ids 5 and 6 do not exist
    st.lists(st.sampled_from([-float("inf"), float("nan"), 0.0, 1.0, 2.5]), min_size=15, max_size=15),
    st.sampled_from([0.0, 0.6, 1.0]),
    st.sampled_from([0, 2]),
    st.sampled_from([1.0, 0.7]),
    st.integers(0, 2),
    st.booleans(),
)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(some=st.lists(rows, min_size=1, max_size=4), padding=st.integers(0, 3))
def test_support_and_padding(some, padding):
    """Whatever the rows: valid tokens of the target's support, and the same ones with padding rows of NaN behind them."""
    drafts, logits, temperature, top_k, top_p, method, one_hot = (list(column) for column in zip(*some, strict=True))
    batch = len(some)
    args = arguments(
        batch, 2, 5, logits=torch.tensor(logits).view(batch, 3, 5), draft_tokens=torch.tensor(drafts),
        temperature=torch.tensor(temperature), top_k=torch.tensor(top_k), top_p=torch.tensor(top_p),
        method=torch.tensor(method), one_hot=torch.tensor(one_hot),
    )  # fmt: skip
    emitted, accepted, repaired = rejection_sample(*args)
    assert_valid(args, emitted, accepted, repaired)
    last = accepted[:, None, None].expand(-1, 1, 5)
    law = token_law(args[0].gather(1, last)[:, 0], *args[3:7])
    assert (law.gather(1, emitted.gather(1, accepted[:, None])) > 0).all()

    longer = [None if arg is None else torch.cat([arg, arg[:1].expand(padding, *arg.shape[1:])]) for arg in args]
    longer[0][batch:] = float("nan")
    longer[1][batch:] = -1
    for got, want in zip(rejection_sample(*longer), (emitted, accepted, repaired), strict=True):
        assert torch.equal(got[:batch], want)


def integers(*shape):
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize("op", [rejection_sample, rejection_sample_reference])
@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(2, 9), r"logits is float32 \[2, 9\]; allowed is any float \[any, any, any\]"),
        (0, integers(2, 3, 9), r"logits is int64 \[2, 3, 9\]; allowed is any float"),
        (0, torch.zeros(2, 0, 9), r"logits is \[2, 0, 9\]; allowed is \[B, k \+ 1, V\] with k ≥ 0 and V ≥ 1"),
        (1, integers(2, 3), r"draft_tokens is int64 \[2, 3\]; allowed is int64 \[2, 2\]"),
        (1, integers(2, 2).int(), r"draft_tokens is int32 \[2, 2\]; allowed is int64 \[2, 2\]"),
        (2, torch.zeros(2, 2, 8), r"draft_law is float32 \[2, 2, 8\]; allowed is any float \[2, 2, 9\]"),
        (3, torch.ones(3), r"temperature is float32 \[3\]; allowed is float32 \[2\]"),
        (3, torch.ones(2).double(), r"temperature is float64 \[2\]; allowed is float32 \[2\]"),
        (4, torch.zeros(2), r"top_k is float32 \[2\]; allowed is int64 \[2\]"),
        (5, torch.ones(2, 1), r"top_p is float32 \[2, 1\]; allowed is float32 \[2\]"),
        (6, torch.ones(()), r"min_p is float32 \[\]; allowed is float32 \[2\]"),
        (7, torch.ones(2), r"seed is float32 \[2\]; allowed is int64 \[2\]"),
        (8, integers(1), r"base is int64 \[1\]; allowed is int64 \[2\]"),
        (9, integers(2).int(), r"method is int32 \[2\]; allowed is int64 \[2\]"),
        (10, torch.ones(2, 1), r"rates has 1 columns; allowed are 2 or more"),
        (11, integers(2), r"one_hot is int64 \[2\]; allowed is bool \[2\]"),
        (12, torch.ones(9), r"d2t is float32 \[9\]; allowed is int64 \[any\]"),
        (12, integers(4), r"draft_law is float32 \[2, 2, 9\]; allowed is any float \[2, 2, 4\]"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(op, position, value, message):
    args = arguments(2, 2, 9)
    args[position] = value
    with pytest.raises(ValueError, match=f"rejection_sample: {message}"):
        op(*args)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [9, -1])
def test_a_draft_vocabulary_that_the_target_does_not_have(wrong, temperature):
    args = arguments(2, 2, 9, temperature=temperature, d2t=torch.tensor([3, wrong, 0]), draft_law=torch.ones(2, 2, 3) / 3)
    with pytest.raises(ValueError, match=f"rejection_sample: d2t has {wrong}; allowed are ids from 0 to 8"):
        rejection_sample(*args)


def test_laws_and_draws_name_what_is_wrong():
    plain = (torch.ones(2), integers(2), torch.ones(2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"token_law: logits is float32 \[9\]; allowed is any float \[any, any\]"):
        token_law(torch.zeros(9), *plain)
    with pytest.raises(ValueError, match=r"token_law: top_p is float32 \[3\]; allowed is float32 \[2\]"):
        token_law(torch.zeros(2, 9), *plain[:2], torch.ones(3), plain[3])
    with pytest.raises(ValueError, match=r"draw: position is int32 \[2\]; allowed is int64 \[2\]"):
        draw(torch.ones(2, 9), integers(2), integers(2).int(), integers(2), 0)
