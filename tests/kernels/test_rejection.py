"""Rejection sampling: the law of what is emitted by chi-square at fixed seeds, and its edges (cases 1, 2, 4 to 11)."""

import math

import pytest
import torch
from rejection_cases import run

import stepgraph.kernels.rejection.reference as rejection_module
from stepgraph.kernels.philox import Stream, uniform
from stepgraph.kernels.sampling import draw, token_law, token_law_reference

NAN, INF = math.nan, math.inf
SEEDS = 20_000


def drafted(law, column: int = 0, base: int = 7, stream: Stream = Stream.DRAFT):
    """Drafts of seeds 0 .. N − 1 for `law [N, V]`, as a drafter draws them."""
    rows = torch.arange(law.shape[0])
    return draw(law, rows, torch.full_like(rows, base + 1 + column), torch.full_like(rows, base), int(stream))


def logs(*laws) -> torch.Tensor:
    return torch.tensor(laws, dtype=torch.float64).log()


# --- the law at fixed seeds --------------------------------------------------------------------------------------------------


class TestIndependentStreams:
    """Case 1: V = 4, a flat target, draft logits [2, 0, −1, −3]."""

    def sample(self, stream):
        law = torch.tensor([2.0, 0.0, -1.0, -3.0]).softmax(-1).expand(SEEDS, 4)
        drafts = drafted(law, stream=stream)
        return run(torch.zeros(SEEDS, 2, 4), drafts[:, None], law[:, None])

    def test_the_output_is_flat(self, chi_square, fast_law):
        emitted, accepted = self.sample(Stream.DRAFT)
        assert chi_square(emitted[:, 0], [0.25] * 4) < 16.27
        assert chi_square(emitted[:, 1][accepted == 1], [0.25] * 4) < 16.27
        q = torch.tensor([2.0, 0.0, -1.0, -3.0]).softmax(-1)
        rate = torch.minimum(q, torch.tensor(0.25)).sum().item()
        assert abs(accepted.double().mean().item() - rate) < 4 * math.sqrt(rate * (1 - rate) / SEEDS)

    def test_the_test_has_power(self, chi_square, fast_law):
        """Drafts drawn with the recovery's noise are caught."""
        emitted, _ = self.sample(Stream.TARGET)
        assert chi_square(emitted[:, 0], [0.25] * 4) > 50


def test_columns_have_numbers_of_their_own(assert_law, fast_law):
    """Each column's acceptance, and the token after it, is independent of the columns before."""
    law = torch.tensor([2.0, 0.0, -1.0, -3.0]).softmax(-1).expand(SEEDS, 2, 4)
    drafts = torch.stack([drafted(law[:, i], column=i) for i in range(2)], 1)
    emitted, accepted = run(torch.zeros(SEEDS, 3, 4), drafts, law)
    rate = float(law[0, 0].clamp(max=0.25).sum())
    assert_law(accepted, [1 - rate, rate * (1 - rate), rate**2])
    assert_law(emitted[accepted >= 1, 1], [0.25] * 4)
    assert_law(emitted[accepted == 2, 2], [0.25] * 4)


def test_numbers_are_keyed_by_seed_position_base_and_stream():
    """Acceptance of draft i uses position base + 1 + i; the token after a accepted drafts is drawn at base + 1 + a."""
    rows, k = 200, 3
    g = torch.Generator().manual_seed(8)
    logits, law = torch.randn(rows, k + 1, 6, generator=g), torch.randn(rows, k, 6, generator=g).softmax(-1)
    seed, base = torch.arange(rows) * 2**32 + 5, torch.randint(0, 50, (rows,), generator=g)
    drafts = torch.stack([draw(law[:, i], seed, base + 1 + i, base, int(Stream.DRAFT)) for i in range(k)], 1)
    emitted, accepted = run(logits, drafts, law, seed=seed, base=base)

    p = logits.softmax(-1)
    u = torch.stack([uniform(seed, base + 1 + i, base, Stream.ACCEPT) for i in range(k)], 1)
    ratio = p[:, :k].gather(2, drafts[..., None])[..., 0] / law.gather(2, drafts[..., None])[..., 0]
    assert torch.equal(accepted, (u < ratio).long().cumprod(1).sum(1))
    assert set(accepted.tolist()) == {0, 1, 2, 3}
    for row, a in enumerate(accepted.tolist()):
        weights = (p[row, a] - law[row, a]).clamp(min=0) if a < k else p[row, a]
        one = slice(row, row + 1)
        expected = draw(weights[None], seed[one], base[one] + 1 + a, base[one], int(Stream.TARGET))
        assert emitted[row, a] == expected


class TestOneHotAndSampledDrafts:
    """Case 2: p = [.6, .3, .1]."""

    p = (0.6, 0.3, 0.1)
    logits = torch.tensor(p, dtype=torch.float64).log().expand(SEEDS, 2, 3)

    def test_one_hot(self, assert_law, fast_law):
        emitted, accepted = run(self.logits, torch.full((SEEDS, 1), 2))
        assert_law(accepted, [0.9, 0.1])
        assert_law(emitted[accepted == 0, 0], [2 / 3, 1 / 3, 0])
        assert_law(emitted[:, 0], self.p)

    def test_sampled(self, assert_law, fast_law):
        q = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64).expand(SEEDS, 3)
        emitted, accepted = run(self.logits, drafted(q)[:, None], q[:, None])
        assert_law(accepted, [0.5, 0.5])
        assert (emitted[accepted == 0, 0] == 0).all()
        assert_law(emitted[:, 0], self.p)


def test_coarse_draft_logits(assert_law, fast_law):
    """Case 4: the drafter's logits are bfloat16, its law is computed from them, and that law is what it drew from."""
    g = torch.Generator().manual_seed(0)
    coarse = (torch.randn(1, 6, generator=g) * 2).to(torch.bfloat16)
    parameters = (torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.zeros(1))
    q = token_law(coarse, *parameters).expand(SEEDS, 6)
    target = torch.randn(6, generator=g)
    emitted, accepted = run(target.expand(SEEDS, 2, 6), drafted(q)[:, None], q[:, None])
    assert_law(emitted[:, 0], target.double().softmax(-1))
    assert_law(emitted[accepted == 1, 1], target.double().softmax(-1))


def test_a_greedy_draft_is_one_hot_and_its_softmax_is_biased(assert_law, chi_square, fast_law):
    """Case 5."""
    target, draft = torch.tensor([0.5, 1.0, 0.0, -1.0]), torch.tensor([1.5, 1.0, 0.0, -1.0])
    logits, drafts = target.expand(SEEDS, 2, 4), torch.zeros(SEEDS, 1, dtype=torch.int64)
    emitted, _ = run(logits, drafts)
    assert_law(emitted[:, 0], target.double().softmax(-1))
    biased, _ = run(logits, drafts, draft.softmax(-1).expand(SEEDS, 1, 4))
    assert chi_square(biased[:, 0], target.double().softmax(-1)) > 200


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.71},
        {"min_p": 0.31},
        {"temperature": 1.6, "top_k": 5, "top_p": 0.83, "min_p": 0.05},
    ],
    ids=str,
)
def test_filters_apply_to_accepted_recovered_and_bonus_tokens(options, law_oracle, assert_law, fast_law):
    """Case 10: an unfiltered draft, a filtered target; what is emitted has the law of plain sampling."""
    rows = 12_000
    first, second = [1.0, 0.2, -0.5, 0.9, -2.0, 0.4], [0.0, 1.0, 0.8, -1.0, 0.3, 0.1]
    q = torch.tensor([0.5, 0.1, 1.0, 0.2, 0.3, 0.0]).softmax(-1).expand(rows, 6)
    logits = torch.tensor([first, second]).expand(rows, 2, 6)
    emitted, accepted = run(logits, drafted(q)[:, None], q[:, None], **options)
    assert 0.1 < accepted.double().mean() < 0.9
    assert_law(emitted[:, 0], law_oracle(first, **options))
    assert_law(emitted[accepted == 1, 1], law_oracle(second, **options))
    missing, _ = run(logits, torch.full((rows, 1), -1), q[:, None], **options)
    assert_law(missing[:, 0], law_oracle(first, **options))


# --- edges -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-24, math.nextafter(1.0, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_uniforms_stay_in_the_support(monkeypatch, u, dtype):
    """Case 6: a draft without target mass is refused at u = 0; one with p = q is accepted at the largest u."""
    values = torch.tensor(u, dtype=torch.float64)
    if dtype == torch.float32:
        values = values.clamp(max=1 - 2.0**-24)  # the largest there is
    monkeypatch.setattr(rejection_module, "uniform", lambda seed, position, *_: values.expand(seed.shape[0], position.shape[1]))
    p = torch.tensor([0.3, 0.3, 0.4, 0.0], dtype=dtype)
    q = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=dtype)
    drafts = torch.arange(4)[:, None]
    for law in (None, q.expand(4, 1, 4)):
        emitted, accepted = run(p.log().expand(4, 2, 4), drafts, law)
        assert (emitted < 3).all()
        assert accepted[3] == 0
        assert accepted[:3].tolist() == ([1, 1, 1] if u == 0 or law is not None else [0, 0, 0])

    logits = torch.randn(200, 2, 9, generator=torch.Generator().manual_seed(0)).to(dtype)
    same = token_law_reference(
        logits[:, 0], torch.ones(200), torch.zeros(200, dtype=torch.int64), torch.ones(200), torch.zeros(200)
    )
    assert (run(logits, drafted(same)[:, None], same[:, None])[1] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_rejection_that_leaves_no_residual_draws_from_the_target(monkeypatch, dtype):
    """p and q agree to the last bit and the draft is refused all the same."""
    monkeypatch.setattr(
        rejection_module, "uniform", lambda seed, position, *_: torch.full((seed.shape[0], position.shape[1]), 2.0)
    )
    p = torch.tensor([0.5, 0.0, 0.5], dtype=dtype)
    rows = 400
    emitted, accepted = run(p.log().expand(rows, 2, 3), torch.zeros(rows, 1, dtype=torch.int64), p.expand(rows, 1, 3))
    assert (accepted == 0).all()
    assert set(emitted[:, 0].tolist()) == {0, 2}


def test_disjoint_supports(assert_law, fast_law):
    rows = 4000
    q = torch.tensor([0.0, 0.0, 0.4, 0.6]).expand(rows, 4)
    logits = logs([0.7, 0.3, 0, 0], [0.25] * 4).float().expand(rows, 2, 4)
    emitted, accepted = run(logits, drafted(q)[:, None], q[:, None])
    assert (accepted == 0).all()
    assert_law(emitted[:, 0], [0.7, 0.3, 0, 0])


def test_a_residual_of_one_token():
    rows = 500
    q = torch.tensor([0.5, 0.3, 0.2]).expand(rows, 3)
    logits = logs([0.25, 0.15, 0.6], [1 / 3] * 3).float().expand(rows, 2, 3)
    emitted, accepted = run(logits, drafted(q)[:, None], q[:, None])
    assert 0 < accepted.sum() < rows
    assert (emitted[accepted == 0, 0] == 2).all()


def peaked(*tokens: int, vocab: int = 11) -> torch.Tensor:
    """Logits `[1, len(tokens), V]` whose arg-max follows `tokens`."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), vocab) * 4.0


class TestGreedyRows:
    """Temperature 0: drafts are accepted as long as they are the arg-max, then the arg-max follows."""

    def greedy(self, logits, drafts, **options):
        emitted, accepted = run(logits, torch.tensor([drafts], dtype=torch.int64), temperature=0.0, **options)
        return emitted[0].tolist(), accepted.item()

    def test_perfect_match(self):
        assert self.greedy(peaked(4, 5, 6, 7), [4, 5, 6]) == ([4, 5, 6, 7], 3)

    def test_early_mismatch(self):
        assert self.greedy(peaked(4, 5, 6, 7), [3, 5, 6]) == ([4, -1, -1, -1], 0)

    def test_mismatch_in_the_middle(self):
        assert self.greedy(peaked(4, 5, 6, 7), [4, 5, 0]) == ([4, 5, 6, -1], 2)

    def test_only_the_first_of_several_mismatches_counts(self):
        assert self.greedy(peaked(4, 5, 6, 7, 8), [4, 1, 6, 1]) == ([4, 5, -1, -1, -1], 1)

    @pytest.mark.parametrize("drafts", [[4, 5, -1], [4, -1, -1], [-1, -1, -1], [4, -1, 6], [-1, 5, 6]])
    def test_ragged_drafts(self, drafts):
        """Nothing counts from the first −1 on."""
        count = drafts.index(-1)
        assert self.greedy(peaked(4, 5, 6, 7), drafts) == ([4, 5, 6, 7][: count + 1] + [-1] * (3 - count), count)

    def test_ties_go_to_the_lowest_id(self):
        logits = torch.zeros(1, 2, 5)
        assert self.greedy(logits, [0]) == ([0, 0], 1)
        assert self.greedy(logits, [1]) == ([0, -1], 0)

    def test_a_sampled_draft_law_changes_nothing(self):
        law = torch.full((1, 3, 11), 1 / 11)
        for drafts in ([4, 5, 6], [4, 0, 6], [0, 0, 0], [4, 5, -1]):
            assert self.greedy(peaked(4, 5, 6, 7), drafts, law=law) == self.greedy(peaked(4, 5, 6, 7), drafts)

    def test_against_a_loop(self, fast_law):
        g = torch.Generator().manual_seed(0)
        for k in range(6):
            logits = torch.randint(0, 3, (60, k + 1, 3), generator=g).float()
            drafts = torch.randint(-1, 3, (60, k), generator=g)
            emitted, accepted = run(logits, drafts, temperature=0.0)
            for row in range(60):
                best = [max(range(3), key=lambda v, r=r: (logits[row, r, v].item(), -v)) for r in range(k + 1)]
                count = 0
                while count < k and drafts[row, count] == best[count]:
                    count += 1
                assert accepted[row] == count
                assert emitted[row].tolist() == best[: count + 1] + [-1] * (k - count)


def test_greedy_and_sampled_rows_in_one_batch(assert_law, fast_law):
    """Case 7: temperatures [0, 1, 0.0] over and over; each third of the batch as if it were alone."""
    rows = 9000
    base_logits = torch.tensor([[1.0, 0.5, 1.25, -1.0, 1.25], [0.0, 2.0, 0.0, 1.0, 0.5]])
    logits = base_logits.expand(rows, 2, 5)
    q = torch.tensor([0.3, 0.1, 0.2, 0.2, 0.2]).expand(rows, 5)
    drafts = drafted(q)[:, None]
    temperature = torch.tensor([0.0, 1.0, 0.0]).repeat(rows // 3)
    emitted, accepted = run(logits, drafts, q[:, None], temperature=temperature)
    greedy = temperature == 0
    assert (emitted[greedy, 0] == 2).all()
    assert torch.equal(accepted[greedy] == 1, drafts[greedy, 0] == 2)
    assert (emitted[greedy & (accepted == 1), 1] == 1).all()
    assert_law(emitted[~greedy, 0], base_logits[0].double().softmax(-1))
    assert_law(emitted[~greedy & (accepted == 1), 1], base_logits[1].double().softmax(-1))


@pytest.mark.parametrize("law", [None, torch.zeros(90, 0, 7)], ids=["one-hot", "sampled"])
def test_without_drafts_it_is_plain_sampling(law):
    """k = 0, token for token."""
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(90, 1, 7, generator=g)
    temperature = torch.tensor([0.0, 0.8, 1.2]).repeat(30)
    options = (temperature, torch.tensor([0, 0, 4]).repeat(30), torch.tensor([1.0, 0.9, 1.0]).repeat(30), torch.zeros(90))
    base = torch.arange(90) + 3
    emitted, accepted = run(
        logits,
        torch.zeros(90, 0, dtype=torch.int64),
        law,
        temperature=temperature,
        top_k=options[1],
        top_p=options[2],
        base=base,
    )
    plain = draw(token_law(logits[:, 0], *options), torch.arange(90), base + 1, base, int(Stream.TARGET))
    assert torch.equal(emitted[:, 0], plain)
    assert (accepted == 0).all()


def test_rows_without_a_draft_equal_plain_sampling_token_for_token():
    """Case 18 at the op: padded to k = 3 with "no draft", whatever law lies in the unused columns."""
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(60, 4, 7, generator=g)
    plain, _ = run(logits[:, :1], torch.zeros(60, 0, dtype=torch.int64))
    logits[:, 1:] = NAN
    for law in (None, torch.full((60, 3, 7), NAN)):
        emitted, accepted = run(logits, torch.full((60, 3), -1), law)
        assert torch.equal(emitted[:, :1], plain)
        assert (accepted == 0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits(temperature):
    """Case 8, V = 10: in the vocabulary, right where there is a right token, neighbours unchanged."""
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 4, 10, generator=g) * 2
    law = torch.rand(6, 3, 10, generator=g).softmax(-1)
    drafts = torch.randint(0, 10, (6, 3), generator=g)
    clean_emitted, clean_accepted = run(logits, drafts, law, temperature=temperature)
    logits[1] = NAN
    logits[2, :, 0] = NAN
    logits[3] = -INF
    logits[3, :, 7] = 1.0
    logits[4, :, 3] = INF
    emitted, accepted = run(logits, drafts, law, temperature=temperature)  # checks the vocabulary
    assert torch.equal(emitted[[0, 5]], clean_emitted[[0, 5]])
    assert torch.equal(accepted[[0, 5]], clean_accepted[[0, 5]])
    assert 0 not in emitted[2].tolist()
    assert set(emitted[3].tolist()) <= {7, -1}
    assert set(emitted[4].tolist()) <= {3, -1}


def world(rows: int = 8, k: int = 3, vocab: int = 13):
    g = torch.Generator().manual_seed(6)
    law = (torch.randn(rows, k, vocab, generator=g)).softmax(-1)
    drafts = torch.randint(0, vocab, (rows, k), generator=g)
    drafts[2, 1:] = -1
    drafts[5] = -1
    return {
        "logits": torch.randn(rows, k + 1, vocab, generator=g),
        "drafts": drafts,
        "law": law,
        "temperature": torch.tensor([0.9, 0.0, 1.0, 0.7, 1.3, 0.9, 0.0, 2.0]),
        "top_k": torch.tensor([0, 0, 5, 0, 0, 3, 2, 0]),
        "top_p": torch.tensor([1.0, 1.0, 0.9, 0.8, 1.0, 1.0, 0.5, 1.0]),
        "min_p": torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.2]),
        "seed": torch.tensor([42, 42, 7, 2**40, -5, 42, 0, 1]),
        "base": torch.tensor([9, 9, 100, 3, 50, 9, 0, 7]),
    }


@pytest.mark.parametrize("one_hot", [True, False])
def test_a_request_does_not_see_its_neighbours(one_hot):
    """Case 9: alone, among 1 to 7 others, in another row, padded to 16 with NaN rows: the same tokens."""
    inputs = world()
    if one_hot:
        inputs["law"] = None

    def at(index):
        picked = {name: value if value is None else value[index] for name, value in inputs.items()}
        return run(picked.pop("logits"), picked.pop("drafts"), picked.pop("law"), **picked)

    emitted, accepted = at(torch.arange(8))
    for index in [*(torch.arange(n) for n in range(1, 8)), *(torch.tensor([r]) for r in range(8)), torch.arange(7, -1, -1)]:
        some_emitted, some_accepted = at(index)
        assert torch.equal(some_emitted, emitted[index])
        assert torch.equal(some_accepted, accepted[index])

    for name in inputs:
        if inputs[name] is not None:
            inputs[name] = torch.cat([inputs[name], inputs[name]])
    inputs["logits"][8:] = NAN
    inputs["drafts"][8:] = -1
    padded_emitted, padded_accepted = at(torch.arange(16))
    assert torch.equal(padded_emitted[:8], emitted)
    assert torch.equal(padded_accepted[:8], accepted)


def test_the_same_inputs_at_other_positions_draw_anew():
    """Case 9: 100 steps of one request over fixed logits do not repeat themselves."""
    rows = 100
    logits, drafts = torch.zeros(rows, 3, 1000), torch.full((rows, 2), -1)
    emitted, _ = run(logits, drafts, seed=42, base=torch.arange(rows))
    assert len(set(emitted[:, 0].tolist())) > 85  # 95 of 1000 expected for independent draws
    again, _ = run(logits, drafts, seed=42, base=torch.arange(rows))
    assert torch.equal(again, emitted)


def test_inputs_are_left_alone():
    inputs = world()
    copies = {name: value.clone() for name, value in inputs.items()}
    arguments = dict(inputs)
    run(arguments.pop("logits"), arguments.pop("drafts"), arguments.pop("law"), **arguments)
    for name, value in inputs.items():
        assert torch.equal(value, copies[name]), name
