"""From logits to a law to a token: the filters against plain Python, non-finite rows, and draws by chi-square."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stepgraph.kernels.sampling as sampling
from stepgraph.kernels.philox import Stream
from stepgraph.kernels.sampling import draw, draw_reference, greedy_tokens, token_law, token_law_reference
from stepgraph.kernels.sampling_cpu import draw_cpu, token_law_cpu

LAWS = {"reference": token_law_reference, "op": token_law}
NAN, INF = math.nan, math.inf
fast = settings(max_examples=50, deadline=None, derandomize=True, database=None)


def parameters(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int64),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )


def mixed_parameters(rows: int, seed: int):
    g = torch.Generator().manual_seed(seed)

    def pick(*choices, dtype=torch.float32):
        return torch.tensor(choices, dtype=dtype)[torch.randint(len(choices), (rows,), generator=g)]

    return (
        pick(0.0, 0.3, 1.0, 1.7),
        pick(0, 0, 1, 3, 1000, dtype=torch.int64),
        pick(1.0, 1.0, 0.317, 0.871),
        pick(0.0, 0.0, 0.043, 1.0),
    )


def counters(rows: int, position: int = 9, base: int = 8):
    seed = torch.arange(rows)
    return seed, torch.full_like(seed, position), torch.full_like(seed, base)


# Few distinct values, so that ties are common; thresholds that no such law meets exactly.
logit = st.integers(-5, 5).map(float) | st.sampled_from([-INF, NAN, 0.5])
row = st.tuples(
    st.lists(logit, min_size=9, max_size=9),
    st.sampled_from([0.0, 0.5, 1.0, 1.75]),
    st.sampled_from([0, 0, 1, 2, 3, 5, 9, 50]),
    st.sampled_from([1.0, 1.0, 0.0371, 0.3173, 0.6137, 0.8719, 0.9973]),
    st.sampled_from([0.0, 0.0, 0.0431, 0.2371, 0.6113, 1.0]),
)


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_token_law_equals_plain_python(name, dtype, law_oracle):
    @fast
    @given(st.lists(row, min_size=1, max_size=4))
    def check(rows):
        logits, temperature, top_k, top_p, min_p = (list(column) for column in zip(*rows, strict=True))
        law = LAWS[name](
            torch.tensor(logits, dtype=dtype),
            torch.tensor(temperature),
            torch.tensor(top_k),
            torch.tensor(top_p),
            torch.tensor(min_p),
        )
        assert law.dtype == dtype
        expected = torch.tensor([law_oracle(*values) for values in rows], dtype=dtype)
        assert torch.equal(law > 0, expected > 0)  # the support is discrete
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        torch.testing.assert_close(law, expected, rtol=tolerance, atol=tolerance * 1e-2)

    check()


@pytest.mark.parametrize("name", LAWS)
class TestFilters:
    def support(self, name, logits, **options) -> list[int]:
        logits = torch.tensor([logits], dtype=torch.float64)
        return LAWS[name](logits, *parameters(1, **options))[0].nonzero().flatten().tolist()

    def test_top_k_keeps_exactly_k_of_equal_logits(self, name):
        for k in range(1, 6):
            assert self.support(name, [1.0] * 6, top_k=k) == list(range(k))
        assert self.support(name, [0.0, 2.0, 1.0, 1.0, 1.0], top_k=3) == [1, 2, 3]

    def test_top_p_keeps_the_smallest_sufficient_set(self, name):
        assert self.support(name, [0.0] * 4, top_p=0.5) == [0, 1]  # exactly half is enough
        assert self.support(name, [0.0] * 4, top_p=0.5001) == [0, 1, 2]
        assert self.support(name, [0.0] * 4, top_p=0.25) == [0]
        assert self.support(name, [0.0, 9.0, 0.0], top_p=1e-6) == [1]
        assert self.support(name, [0.0, -30.0, 0.0, 0.0], top_p=1.0) == [0, 1, 2, 3]  # 1 keeps what rounding would lose

    def test_min_p_is_relative_to_the_largest(self, name):
        logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
        assert self.support(name, logits, min_p=0.29) == [0, 1, 2]
        assert self.support(name, logits, min_p=0.31) == [0, 1]
        assert self.support(name, [1.0, 3.0, 3.0], min_p=1.0) == [1, 2]

    def test_order_is_min_p_then_top_k_then_top_p_of_what_is_left(self, name):
        logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
        # Of the two that top-k leaves, the first has 4/7 of the mass: more than 0.55, which it has not of the whole law.
        assert self.support(name, logits, top_k=2, top_p=0.55) == [0]
        assert self.support(name, logits, top_p=0.55) == [0, 1]
        assert self.support(name, logits, min_p=0.7, top_p=0.55) == [0]

    def test_min_p_is_applied_after_temperature(self, name):
        logits = [math.log(p) for p in (0.5, 0.25, 0.25)]
        assert self.support(name, logits, min_p=0.4) == [0, 1, 2]
        assert self.support(name, logits, min_p=0.4, temperature=0.5) == [0]

    def test_a_huge_top_k_and_a_vocabulary_of_one(self, name):
        assert self.support(name, [0.0, 1.0], top_k=10**9) == [0, 1]
        assert self.support(name, [3.0], top_k=1, top_p=0.1, min_p=0.9) == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 2, 5, 10, 33, 257])
def test_cpu_law_has_the_bits_of_the_reference(dtype, vocab):
    g = torch.Generator().manual_seed(vocab)
    rows = 40
    logits = (torch.randn(rows, vocab, generator=g, dtype=torch.float64) * 3).to(dtype)
    logits[3] = NAN
    logits[4, 0] = INF
    logits[5] = -INF
    options = mixed_parameters(rows, vocab)
    law, reference = token_law_cpu(logits, *options), token_law_reference(logits, *options)
    assert law.dtype == reference.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(law, reference)
    assert ((law.double().sum(-1) - 1).abs() < 1e-5).all()


def test_greedy_ties_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [NAN, 2.0, 2.0, NAN], [-0.0, 0.0, -1.0, 0.0], [NAN] * 4, [-INF] * 4])
    assert greedy_tokens(logits).tolist() == [1, 1, 0, 0, 0]
    for function in LAWS.values():
        law = function(logits, *parameters(5, temperature=0.0, top_k=2, top_p=0.3, min_p=0.5))
        assert torch.equal(law, torch.nn.functional.one_hot(torch.tensor([1, 1, 0, 0, 0]), 4).float())


def test_mixed_temperatures_in_one_batch(assert_law):
    """Case 7: temperature rows [0, 1, 0.0]."""
    rows = 1500
    logits = torch.tensor([1.0, 0.5, 1.25, -1.0, 1.25]).expand(rows, 5)
    temperature = torch.tensor([0.0, 1.0, 0.0]).repeat(rows // 3)
    law = token_law(logits, temperature, *parameters(rows)[1:])
    assert not law.isnan().any()
    tokens = draw(law, *counters(rows), int(Stream.TARGET))
    assert (tokens[0::3] == 2).all()
    assert (tokens[2::3] == 2).all()
    assert_law(tokens[1::3], logits[0].double().softmax(-1))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", LAWS)
def test_non_finite_rows(name, temperature):
    """Case 8, V = 10: always in the vocabulary, the right token where there is one, neighbours unchanged bit for bit."""
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    clean = LAWS[name](logits, *parameters(6, temperature))
    logits[1] = NAN
    logits[2, 0] = NAN
    logits[3] = -INF
    logits[3, 7] = 0.25
    logits[4, 3] = INF
    law = LAWS[name](logits, *parameters(6, temperature))
    tokens = draw(law, *counters(6), int(Stream.TARGET))
    assert law.isfinite().all()
    assert ((tokens >= 0) & (tokens < 10)).all()
    assert torch.equal(law[[0, 5]], clean[[0, 5]])
    assert law[2, 0] == 0
    assert law[3].tolist() == [0.0] * 7 + [1.0] + [0.0] * 2
    assert law[4].tolist() == [0.0] * 3 + [1.0] + [0.0] * 6
    assert tokens[3:5].tolist() == [7, 3]
    if temperature > 0:
        torch.testing.assert_close(law[1], torch.full((10,), 0.1))


def test_extreme_but_finite_logits():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        top = torch.finfo(dtype).max
        logits = torch.tensor([[-top, 0.0, top, -top]], dtype=dtype)
        for options in (parameters(1, 1e-3), parameters(1, 0.7, top_k=2), parameters(1, 1.0, top_p=0.5)):
            assert token_law(logits, *options)[0].tolist() == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("vocab", [2, 3, 5, 6, 7, 10])
def test_draws_follow_the_weights(vocab, assert_law):
    weights = torch.rand(vocab, generator=torch.Generator().manual_seed(vocab)) + 0.05
    if vocab > 3:
        weights[-2] = 0.0
    rows = 12_000
    for scale in (1.0, 1e-3):  # weights need not sum to 1
        tokens = draw(weights.expand(rows, vocab) * scale, *counters(rows), int(Stream.TARGET))
        assert_law(tokens, weights)


def test_draws_along_positions_follow_the_weights(assert_law):
    weights = torch.tensor([0.5, 0.0, 0.2, 0.3])
    positions = torch.arange(12_000)
    tokens = draw(weights.expand(12_000, 4), torch.full_like(positions, 42), positions, positions - 1, int(Stream.DRAFT))
    assert_law(tokens, weights)


def test_probabilities_that_do_not_sum_to_one_never_give_the_last_token():
    """Case 6: the mass that rounding lost does not go to V − 1."""
    rows = 10_000
    law = torch.tensor([0.3, 0.3, 0.3999, 0.0]).expand(rows, 4)
    assert draw(law, *counters(rows), int(Stream.TARGET)).max() == 2


@pytest.mark.parametrize("function", [draw_reference, draw_cpu])
def test_no_noise_makes_a_zero_weight_win(function, monkeypatch):
    """The zero-weight tokens get the shortest possible times and the others the longest."""
    weights = torch.tensor([[0.0, 1e-30, 0.0, 1e-45], [0.0, 0.0, 0.0, 1e-38]])
    times = torch.where(weights > 0, 33 * math.log(2), 2.0**-33).double()
    monkeypatch.setattr(sampling, "exponential", lambda seed, *_: times[-len(seed) :] if len(seed) == 2 else times[:1])
    assert function(weights, *counters(2), int(Stream.TARGET)).tolist() == [1, 3]


def test_the_race_is_won_by_the_smallest_time_over_weight(monkeypatch):
    times = torch.tensor([[1.0, 2.0, 0.5, 3.0]], dtype=torch.float64)
    monkeypatch.setattr(sampling, "exponential", lambda *_: times)
    for weights, winner in [
        ([1.0, 1.0, 1.0, 1.0], 2),
        ([1.0, 5.0, 1.0, 1.0], 1),
        ([0.6, 1.0, 0.1, 6.0], 3),
        ([1.0, 0, 0.4, 0], 0),
    ]:
        assert draw(torch.tensor([weights]), *counters(1), 0).item() == winner


def test_cpu_draw_equals_the_reference():
    g = torch.Generator().manual_seed(3)
    for vocab in (1, 3, 10, 130):
        weights = torch.rand(60, vocab, generator=g) * (torch.rand(60, vocab, generator=g) < 0.3)
        weights[0] = 0.0
        weights[0, -1] = 1.0
        weights[1] = 0.0
        for dtype in (torch.float32, torch.float64):
            arguments = (weights.to(dtype), *counters(60), int(Stream.ACCEPT))
            assert torch.equal(draw_cpu(*arguments), draw_reference(*arguments))


def test_the_stream_seed_position_and_base_all_matter():
    rows = 64
    weights = torch.ones(rows, 50)
    seed, position, base = counters(rows)
    reference = draw(weights, seed, position, base, 0)
    for other in [
        draw(weights, seed, position, base, 2),
        draw(weights, seed + 2**32, position, base, 0),
        draw(weights, seed, position + 1, base, 0),
        draw(weights, seed, position, base + 1, 0),
    ]:
        assert (other == reference).sum() < 10
    assert torch.equal(draw(weights, seed, position, base, 0), reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", LAWS)
def test_rows_do_not_depend_on_neighbours(name, dtype):
    """Case 9 for one row: alone, among 1 to 7 neighbours, padded to 16 with NaN, in any order: same bits, same token."""
    g = torch.Generator().manual_seed(5)
    rows, vocab = 8, 37
    logits = (torch.randn(rows, vocab, generator=g) * 2).to(dtype)
    options = mixed_parameters(rows, 11)
    seed, position, base = torch.arange(rows) * 2**33 + 42, torch.arange(rows) + 5, torch.arange(rows) + 4

    def tokens_and_law(index):
        law = LAWS[name](logits[index], *(option[index] for option in options))
        return draw(law, seed[index], position[index], base[index], int(Stream.TARGET)), law

    tokens, law = tokens_and_law(torch.arange(rows))
    for size in range(1, rows):
        for index in (torch.arange(size), torch.arange(rows - size, rows), torch.randperm(rows, generator=g)[:size]):
            some_tokens, some_law = tokens_and_law(index)
            assert torch.equal(some_tokens, tokens[index])
            assert torch.equal(some_law, law[index])

    padded = torch.full((16, vocab), NAN, dtype=dtype)
    padded[:rows] = logits
    wide = [torch.cat([option, option]) for option in options]
    padded_law = LAWS[name](padded, *wide)
    assert torch.equal(padded_law[:rows], law)
    wide_counters = (torch.cat([counter, counter]) for counter in (seed, position, base))
    assert torch.equal(draw(padded_law, *wide_counters, int(Stream.TARGET))[:rows], tokens)
