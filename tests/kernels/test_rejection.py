"""Rejection sampling: the law of what is emitted by chi-square at fixed seeds, and where it could leave the support."""

import math

import pytest
import torch
from rejection_cases import drafted, run

import stepgraph.kernels.rejection.reference as rejection_module
from stepgraph.kernels.philox import Stream, uniform
from stepgraph.kernels.sampling import draw, token_law, token_law_reference

SEEDS = 20_000


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
