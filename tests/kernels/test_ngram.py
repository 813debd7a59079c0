"""Prompt look-up against a loop that anyone can check."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.ngram import ngram_propose


def slow_proposal(tokens: list[int], k: int, min_match: int, max_match: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest suffix of `tokens`, continued with its period."""
    last = len(tokens) - 1
    for size in range(min(max_match, len(tokens)), min_match - 1, -1):
        suffix = tokens[len(tokens) - size :]
        for end in range(last - 1, size - 2, -1):
            if tokens[end - size + 1 : end + 1] == suffix:
                text = list(tokens)
                for _ in range(k):  # each proposed token is the one a period earlier
                    text.append(text[len(text) - (last - end)])
                return text[len(tokens) :]
    return [-1] * k


def propose(rows: list[list[int]], k: int, min_match: int, max_match: int, *, length: int = 20, fill: int = 0, slots=None):
    """Rows of tokens in a history whose other cells hold `fill`; row r is request `slots[r]`."""
    slots = slots or list(range(len(rows)))
    history = torch.full((max(slots) + 2, length), fill)
    for slot, tokens in zip(slots, rows, strict=True):
        history[slot, : len(tokens)] = torch.tensor(tokens)
    last = torch.tensor([len(tokens) - 1 for tokens in rows])
    before = history.clone()
    out = ngram_propose(history, torch.tensor(slots), last, k, min_match, max_match)
    assert torch.equal(history, before)
    assert out.shape == (len(rows), k)
    assert out.dtype == torch.int64
    return out.tolist()


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(texts, st.integers(0, 7), st.integers(1, 3), st.integers(0, 3), st.integers(-1, 2))
def test_equals_the_slow_loop(rows, k, min_match, more, fill):
    """`fill` stands beyond each text, also as a token of the alphabet: nothing there may matter."""
    max_match = min_match + more
    expected = [slow_proposal(tokens, k, min_match, max_match) for tokens in rows]
    assert propose(rows, k, min_match, max_match, fill=fill) == expected
    longest = max(len(tokens) for tokens in rows)
    assert propose(rows, k, min_match, max_match, fill=fill, length=longest) == expected


def test_longest_match_before_latest_match():
    tokens = [1, 2, 3, 9, 7, 3, 8, 1, 2, 3]
    assert propose([tokens], 2, 1, 3) == [[9, 7]]
    assert propose([tokens], 2, 1, 1) == [[8, 1]]


def test_latest_of_equal_matches():
    assert propose([[5, 1, 5, 2, 5]], 1, 1, 3) == [[2]]


@pytest.mark.parametrize(("tokens", "expected"), [([7, 7], [7] * 6), ([4, 5, 4, 5, 4], [5, 4, 5, 4, 5, 4])])
def test_an_overlapping_match_continues_its_period(tokens, expected):
    assert propose([tokens], 6, 1, 3) == [expected]


def test_period_of_three_is_continued_past_the_end_of_the_history():
    tokens = [1, 2, 3] * 4
    assert propose([tokens], 7, 2, 4, length=len(tokens)) == [[1, 2, 3, 1, 2, 3, 1]]


def test_no_match():
    assert propose([[1, 2, 3, 4]], 3, 1, 3) == [[-1, -1, -1]]
    assert propose([[1, 2, 3, 1]], 3, 2, 3) == [[-1, -1, -1]]  # one token agrees, two are asked for


@pytest.mark.parametrize("tokens", [[5], [5, 5], [5, 6], [6, 5]])
def test_history_at_its_start(tokens):
    """A suffix longer than the history, and history cells before position 0 (wrapped ones), match nothing."""
    for length in (len(tokens), 12):
        for min_match in (1, 2, 3):
            assert propose([tokens], 2, min_match, 5, length=length, fill=5) == [slow_proposal(tokens, 2, min_match, 5)]


def test_nothing_beyond_the_last_position_is_read():
    tokens = [1, 2, 3, 1, 2]
    poison = -(2**40)
    clean = propose([tokens], 5, 1, 3)
    assert clean == [[3, 1, 2, 3, 1]]
    for fill in (poison, 1, 2, 3):
        assert propose([tokens], 5, 1, 3, fill=fill) == clean


def test_rows_are_independent_and_find_their_request_by_slot():
    rows = [[1, 2, 1], [3], [4, 4, 4], [2, 1, 2, 1]]
    alone = [propose([tokens], 3, 1, 3)[0] for tokens in rows]
    assert alone == [[2, 1, 2], [-1, -1, -1], [4, 4, 4], [2, 1, 2]]
    assert propose(rows, 3, 1, 3, slots=[5, 0, 2, 7], fill=1) == alone
    assert propose(rows[::-1], 3, 1, 3, slots=[0, 1, 2, 3], fill=4) == alone[::-1]


def test_several_rows_may_share_a_slot():
    """Padding rows all name the null slot."""
    history = torch.tensor([[1, 2, 1, 2, 9, 9], [0] * 6])
    out = ngram_propose(history, torch.tensor([1, 0, 1, 0]), torch.tensor([0, 3, 0, 2]), 2, 1, 3)
    assert out.tolist() == [[-1, -1], [1, 2], [-1, -1], [2, 1]]
