"""Prompt look-up and commit under the interpreter: exactly the reference, on random and on cornered inputs."""

import pytest
import torch

from stepgraph.kernels.advance import advance_reference
from stepgraph.kernels.advance_triton import advance_triton
from stepgraph.kernels.ngram import ngram_propose_reference
from stepgraph.kernels.ngram_triton import ngram_propose_triton
from stepgraph.kernels.testing import guarded_allocations


def ints(*shape, low=0, high=3, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize(("min_match", "max_match"), [(1, 1), (1, 3), (2, 4)])
def test_ngram_propose(k, min_match, max_match):
    for seed in range(3):
        history = ints(6, 40, high=4, seed=seed)
        history[5] = 7  # one token over and over: the longest match overlaps the suffix
        slots = torch.tensor([2, 0, 4, 5, 1, 3])
        last = torch.tensor([0, 1, 39, 20, 7, 12])
        args = (history, slots, last, k, min_match, max_match)
        with guarded_allocations():
            actual = ngram_propose_triton(*args)
        assert torch.equal(actual, ngram_propose_reference(*args))


def test_ngram_propose_over_several_blocks():
    history = ints(2, 3000, high=1000)
    history[:, 2500:2503] = history[:, 100:103]
    args = (history, torch.tensor([1, 0]), torch.tensor([2502, 2502]), 4, 2, 3)
    assert torch.equal(ngram_propose_triton(*args), ngram_propose_reference(*args))
    assert torch.equal(ngram_propose_triton(*args)[0], history[1, 103:107])


@pytest.mark.parametrize("query_len", [1, 2, 4, 6])
@pytest.mark.parametrize("seed", range(4))
def test_advance(query_len, seed):
    num_slots, max_len, k_max, batch = 6, 20, 5, 4
    slots, live = torch.tensor([3, 1, 5, num_slots]), torch.tensor([True, True, True, False])
    accepted = ints(batch, high=query_len, seed=seed)
    emitted = ints(batch, query_len, high=6, seed=seed + 1)
    emitted = torch.where(torch.arange(query_len) <= accepted[:, None], emitted, -1)
    state = [
        ints(num_slots + 1, low=1, high=18, seed=seed + 2),
        ints(num_slots + 1),
        ints(num_slots + 1, max_len),
        torch.zeros(num_slots + 1, dtype=torch.int64),
        ints(num_slots + 1),
        ints(num_slots + 1, k_max),
        ints(num_slots + 1, k_max),
        ints(num_slots + 1),
        ints(num_slots, 5 + k_max + 1),
    ]
    stop_ids = torch.where(ints(num_slots + 1, 3, high=2) > 0, ints(num_slots + 1, 3, high=6), -1)
    limit = ints(num_slots + 1, low=2, high=max_len + 1, seed=seed + 3)
    inputs = (slots, live, emitted, accepted, accepted, ints(batch, seed=seed + 4))
    expected, actual = [t.clone() for t in state], [t.clone() for t in state]
    advance_reference(*inputs, *expected, stop_ids, limit)
    advance_triton(*inputs, *actual, stop_ids, limit)
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(a, e), index
