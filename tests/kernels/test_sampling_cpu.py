"""Laws and draws on the CPU over long rows, where it ranks and races only what can matter: the specification's bits."""

import math

import pytest
import torch

import stepgraph.kernels.sampling_cpu as sampling_cpu
from stepgraph.kernels.philox import Stream, exponential, exponential_at
from stepgraph.kernels.sampling import draw_reference, greedy_tokens, needs_repair, token_law_reference
from stepgraph.kernels.sampling_cpu import SHORT, draw_cpu, greedy_tokens_cpu, token_law_cpu

NAN, INF = math.nan, math.inf
VOCABS = [SHORT, SHORT + 1, 3001, 4096]


def assert_same(logits, temperature, top_k, top_p, min_p) -> torch.Tensor:
    """Equal laws to the bit, and equal tokens; returns the law."""
    rows = len(logits)
    params = (
        torch.as_tensor(temperature, dtype=torch.float32).expand(rows),
        torch.as_tensor(top_k, dtype=torch.int64).expand(rows),
        torch.as_tensor(top_p, dtype=torch.float32).expand(rows),
        torch.as_tensor(min_p, dtype=torch.float32).expand(rows),
    )
    law = token_law_cpu(logits, *params)
    assert torch.equal(law, token_law_reference(logits, *params))
    counters = (torch.arange(rows) * 2**40, torch.arange(rows) + 5, torch.arange(rows), int(Stream.TARGET))
    assert torch.equal(draw_cpu(law, *counters), draw_reference(law, *counters))
    return law


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mixed_rows(vocab, spread, dtype):
    """Flat to peaked, in every combination of filters, with broken rows among them; half the rows are full of ties."""
    g = torch.Generator().manual_seed(vocab)
    rows = 24
    logits = torch.randn(rows, vocab, generator=g, dtype=torch.float64) * spread
    logits[::2] = (logits[::2] * 2).round() / 2
    logits = logits.to(dtype)
    logits[3], logits[4, 5], logits[5], logits[6, 9], logits[7, vocab // 2 :] = NAN, NAN, -INF, INF, -INF

    def pick(*choices):
        return torch.tensor(choices)[torch.randint(len(choices), (rows,), generator=g)]

    assert_same(
        logits,
        pick(0.0, 0.7, 1.0, 1.6),
        pick(0, 0, 1, 50, vocab - 1, vocab, 2 * vocab),
        pick(1.0, 0.9, 0.5, 1e-9, 0.999999, 1 - 2.0**-24),
        pick(0.0, 0.0, 0.05, 1.0),
    )


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.5 + 2.0**-13, 1 - 2.0**-12])
def test_top_p_at_its_boundary_among_ties(top_p):
    """4,096 equal tokens of mass 2^-12 each: exactly the lowest ids that reach the mass."""
    law = assert_same(torch.zeros(2, 4096), 1.0, 0, top_p, 0.0)
    count = math.ceil(top_p * 4096)
    assert (law > 0).sum(-1).tolist() == [count] * 2
    assert (law[:, :count] > 0).all()


def test_top_k_cuts_a_tie_by_id():
    logits = torch.zeros(1, 4096)
    logits[0, 4000] = 1.0
    law = assert_same(logits, 1.0, 10, 1.0, 0.0)
    assert law[0].nonzero().flatten().tolist() == [*range(9), 4000]


def test_what_is_cut_off_can_be_all_but_one_token():
    logits = torch.full((1, 4096), -40.0)
    logits[0, 17] = 0.0
    for top_p in (0.9, 0.9999999, 1e-9):
        assert assert_same(logits, 1.0, 0, top_p, 0.0)[0].argmax() == 17


def test_only_what_matters_is_ranked(monkeypatch):
    """A filter ranks few of a peaked row's tokens, and all of a flat row's where nothing less is certain."""
    ranked, argsort = [], torch.Tensor.argsort
    monkeypatch.setattr(torch.Tensor, "argsort", lambda t, *a, **o: ranked.append(len(t)) or argsort(t, *a, **o))
    one = (torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.tensor([0.9]), torch.zeros(1))
    logits = torch.randn(1, 30_000, generator=torch.Generator().manual_seed(0)) * 4
    token_law_cpu(logits, *one)
    assert max(ranked) < 6000
    token_law_cpu(torch.zeros(1, 30_000), *one)
    assert max(ranked) == 30_000


@pytest.mark.parametrize("support", [1, 2, 700, 1200, 3000])
def test_a_race_over_the_support(support, monkeypatch):
    g = torch.Generator().manual_seed(support)
    weights = torch.zeros(6, 3000)
    for row in weights:
        row[torch.randperm(3000, generator=g)[:support]] = torch.rand(support, generator=g) + 1e-3
    weights[5] = 0.0
    counters = (torch.tensor([0, 2**63 - 1, -1, 7, 8, 9]), torch.arange(6) + 1, torch.arange(6), int(Stream.DRAFT))
    expected = draw_reference(weights, *counters)
    asked = []
    monkeypatch.setattr(sampling_cpu, "exponential_at", lambda *a: asked.append(len(a[-1])) or exponential_at(*a))
    assert torch.equal(draw_cpu(weights, *counters), expected)
    assert asked == ([support] * 5 if 1 < support < 750 else [])


def test_numbers_of_single_entries():
    seed, position, base = torch.tensor([3, 2**40]), torch.tensor([7, 8]), torch.tensor([5, 5])
    entries = torch.tensor([0, 1, 6, 7, 8, 4091])
    every = exponential(seed, position, base, Stream.TARGET, 4096)
    assert torch.equal(exponential_at(seed, position, base, Stream.TARGET, entries), every[:, entries])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_greedy_tokens_in_one_pass(dtype):
    logits = torch.randn(8, 2, 3001, generator=torch.Generator().manual_seed(0)).mul(4).round().to(dtype)  # ties for the first
    logits[1], logits[2, 0, 5], logits[3], logits[4, 1, 9:12], logits[5, 0, :-1] = NAN, NAN, -INF, INF, -INF
    tokens, broken = greedy_tokens_cpu(logits)
    assert torch.equal(tokens, greedy_tokens(logits))
    assert torch.equal(broken, needs_repair(logits))
