"""Methods of verification: the operator against the law laboratory, mixed rows, reduced draft vocabularies, counters."""

import itertools
import math

import numpy as np
import pytest
import torch

import stepgraph.kernels.rejection.reference as reference_module
from stepgraph.kernels.philox import Stream
from stepgraph.kernels.rejection import Verify, rejection_sample, rejection_sample_reference
from stepgraph.kernels.rejection.law import draft_sequences, target_law, verify
from stepgraph.kernels.sampling import draw, token_law_reference

METHODS = {"standard": Verify.STANDARD, "block": Verify.BLOCK}
SEEDS = 8_000


@pytest.fixture(autouse=True)
def _fast_law(monkeypatch):
    """The vectorised reference law in place of the row-by-row CPU one; test_sampling shows that their bits are equal."""
    monkeypatch.setattr(reference_module, "token_law", token_law_reference)


def model(vocab, seed, concentration=0.8):
    def law(prefix):
        weights = np.random.default_rng([seed, vocab, *prefix]).gamma(concentration, size=vocab) + 1e-3
        return weights / weights.sum()

    return law


def sample(logits, drafts, law=None, *, method=None, op=rejection_sample_reference, seed=None, temperature=1.0, **extra):
    rows = logits.shape[0]
    if isinstance(method, int):
        method = torch.full((rows,), int(method))
    seed = torch.arange(rows) if seed is None else seed
    plain = (torch.zeros(rows, dtype=torch.int64), torch.ones(rows), torch.zeros(rows))
    temperature = torch.as_tensor(temperature, dtype=torch.float32).expand(rows).contiguous()
    return op(logits, drafts, law, temperature, *plain, seed, torch.full((rows,), 7), method, **extra)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_the_operator_is_the_laboratory(monkeypatch, method, k, seed):
    """Every draft sequence and every outcome: thresholds from just below and above, final weights, hence the exact law."""
    vocab = 3 if k < 3 else 2
    target, draft = model(vocab, seed), model(vocab, seed + 100)
    sequences = draft_sequences(draft, k)
    rows = list(sequences)
    logits = torch.tensor(np.array([[target(d[:i]) for i in range(k + 1)] for d in rows])).log()
    law = torch.tensor(np.array([[draft(d[:i]) for i in range(k)] for d in rows]))
    outcomes = [verify(target, draft, d, method) for d in rows]
    thresholds = torch.tensor(np.array([o.thresholds for o in outcomes]))
    weights = []
    monkeypatch.setattr(reference_module, "draw", lambda w, *_: weights.append(w) or w.argmax(-1))

    def accepted_at(u):
        monkeypatch.setattr(reference_module, "uniform", lambda *_: u)
        return sample(logits, torch.tensor(rows), law, method=METHODS[method])[1]

    joint = np.zeros((vocab,) * (k + 1))
    for below in itertools.product([True, False], repeat=k):
        passes = torch.tensor(below).expand(len(rows), k)
        accepted = accepted_at(torch.where(passes, thresholds - 1e-9, thresholds + 1e-9).clamp(min=0))
        # Nothing passes below a threshold of 0; above one of 1, where no number lies, the standard test cannot fail.
        passed = torch.where(passes, thresholds > 1e-9, (thresholds >= 1) & (method == "standard"))
        index = torch.arange(1, k + 1)
        if method == "standard":
            expected = passed.long().cumprod(-1).sum(-1)
        else:
            expected = torch.where(passed, index, 0).amax(-1)
        assert torch.equal(accepted, expected)
        mass = torch.where(passes, thresholds, 1 - thresholds).prod(-1).numpy()
        final = (weights[-1] / weights[-1].sum(-1, keepdim=True)).numpy()
        for row, d in enumerate(rows):
            count = int(accepted[row])
            if mass[row] > 0 and outcomes[row].accepted[count] > 0:
                np.testing.assert_allclose(final[row], outcomes[row].final[count], atol=1e-9)
            for rest in itertools.product(range(vocab), repeat=k + 1 - count):
                text = (*d[:count], *rest)
                later = math.prod(target(text[:i])[text[i]] for i in range(count + 1, k + 1))
                joint[text] += sequences[d] * mass[row] * final[row][rest[0]] * later
    np.testing.assert_allclose(joint, target_law(target, k + 1), atol=1e-9)


class TestBlockVerification:
    """Case 3 at fixed seeds: V = 2, independent target [1/3, 2/3], draft [2/3, 1/3]."""

    def run(self, k, method):
        logits = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).log().expand(SEEDS, k + 1, 2)
        q = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64).expand(SEEDS, k, 2)
        rows = torch.arange(SEEDS)
        drafts = torch.stack(
            [draw(q[:, i], rows, torch.full_like(rows, 8 + i), torch.full_like(rows, 7), int(Stream.DRAFT)) for i in range(k)],
            1,
        )
        return sample(logits, drafts, q, method=method)

    @pytest.mark.parametrize(("k", "standard", "block"), [(1, 2 / 3, 2 / 3), (2, 10 / 9, 11 / 9), (3, 38 / 27, 5 / 3)])
    def test_acceptance(self, k, standard, block):
        for method, expected in ((Verify.STANDARD, standard), (Verify.BLOCK, block)):
            accepted = self.run(k, method)[1].double()
            assert abs(accepted.mean() - expected) < 4 * accepted.std() / SEEDS**0.5

    def test_one_draft_is_standard_verification(self):
        standard, block = self.run(1, Verify.STANDARD), self.run(1, Verify.BLOCK)
        assert torch.equal(standard[0], block[0])

    def test_joint_law(self, assert_law):
        emitted, accepted, _ = self.run(2, Verify.BLOCK)
        # Continue each run to three tokens with the target's own draws.
        rows = torch.arange(SEEDS)
        for column in (1, 2):
            weights = torch.tensor([1 / 3, 2 / 3]).expand(SEEDS, 2)
            more = draw(weights, rows + 10**6, torch.full_like(rows, column), rows * 0, int(Stream.TARGET))
            emitted[:, column] = torch.where(column > accepted, more, emitted[:, column])
        p = np.array([1 / 3, 2 / 3])
        assert_law(emitted @ torch.tensor([4, 2, 1]), np.einsum("i,j,k->ijk", p, p, p))


def world(rows=600, k=3, vocab=7):
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(rows, k + 1, vocab, generator=g)
    law = torch.randn(rows, k, vocab, generator=g).softmax(-1)
    drafts = torch.multinomial(law.view(-1, vocab), 1, generator=g).view(rows, k)
    drafts[::5, 1:] = -1
    drafts[::7] = -1
    return logits, drafts, law


@pytest.mark.parametrize("sampled", [True, False])
def test_methods_mix_in_one_batch(sampled):
    """Each row as in a batch of its own method; the CPU implementation is the reference."""
    logits, drafts, law = world()
    law = law if sampled else None
    rates = torch.tensor([0.9, 0.5, 0.2]).expand(len(drafts), 3)
    method = torch.arange(len(drafts)) % 3
    mixed = sample(logits, drafts, law, method=method, rates=rates)
    for each in Verify:
        alone = sample(logits, drafts, law, method=each, rates=rates)
        for got, expected in zip(mixed, alone, strict=True):
            assert torch.equal(got[method == each], expected[method == each])
    for got, expected in zip(sample(logits, drafts, law, method=method, rates=rates, op=rejection_sample), mixed, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("method", list(Verify))
def test_rows_without_drafts_and_ragged_rows(method):
    logits, drafts, law = world()
    law[drafts < 0] = math.nan
    rates = torch.ones(len(drafts), 3)
    emitted, accepted, _ = sample(logits, drafts, law, method=method, rates=rates)
    count = (drafts >= 0).sum(1)
    assert (accepted <= count).all()
    assert (accepted[count == 1] > 0).any()
    plain = sample(logits[:, :1], drafts[:, :0], None)[0]
    assert torch.equal(emitted[count == 0, :1], plain[count == 0])
    if method == Verify.SYNTHETIC:
        assert torch.equal(accepted, count)


@pytest.mark.parametrize("method", list(METHODS.values()))
def test_greedy_rows_do_not_depend_on_the_method(method):
    logits, drafts, law = world()
    drafts[:, 0] = torch.where(drafts[:, 0] >= 0, logits[:, 0].argmax(-1), -1)
    expected = sample(logits, drafts, law, temperature=0.0)
    for op in (rejection_sample_reference, rejection_sample):
        for got, want in zip(sample(logits, drafts, law, temperature=0.0, method=method, op=op), expected, strict=True):
            assert torch.equal(got, want)
    assert set(expected[1].tolist()) == {0, 1, 2, 3}


def test_synthetic_rates():
    logits, drafts, law = torch.zeros(SEEDS, 4, 5), torch.ones(SEEDS, 3, dtype=torch.int64), None
    rates = torch.tensor([0.8, 0.5, 0.25]).expand(SEEDS, 3)
    accepted = sample(logits, drafts, law, method=Verify.SYNTHETIC, rates=rates)[1]
    for position, rate in enumerate([0.8, 0.5, 0.25]):
        reached = accepted >= position
        assert abs((accepted[reached] > position).double().mean() - rate) < 4 * (rate * (1 - rate) / reached.sum()) ** 0.5


@pytest.mark.parametrize("method", list(METHODS.values()))
def test_one_hot_rows_ignore_their_law(method):
    logits, drafts, law = world()
    one_hot = torch.arange(len(drafts)) % 2 == 0
    mixed = sample(logits, drafts, law, method=method, one_hot=one_hot)
    for flag, alone in (
        (True, sample(logits, drafts, None, method=method)),
        (False, sample(logits, drafts, law, method=method)),
    ):
        for got, expected in zip(mixed, alone, strict=True):
            assert torch.equal(got[one_hot == flag], expected[one_hot == flag])


@pytest.mark.parametrize("method", list(METHODS.values()))
def test_a_reduced_draft_vocabulary(assert_law, method):
    """The drafter knows target tokens 5, 0 and 3 only, under its own ids 0, 1, 2."""
    d2t, q = torch.tensor([5, 0, 3]), torch.tensor([0.5, 0.2, 0.3])
    rows = torch.arange(SEEDS)
    drafts = torch.stack([draw(q.expand(SEEDS, 3), rows, rows * 0 + 8 + i, rows * 0 + 7, int(Stream.DRAFT)) for i in (0, 1)], 1)
    logits = torch.tensor([0.3, 1.0, -1.0, 0.0, 0.5, 0.8])
    law = q.expand(SEEDS, 2, 3)
    emitted, accepted, _ = sample(logits.expand(SEEDS, 3, 6), d2t[drafts], law, method=method, d2t=d2t)
    p = logits.double().softmax(-1)
    assert_law(emitted[:, 0], p)
    assert_law(emitted[accepted == 2, 2], p)
    full = torch.zeros(SEEDS, 2, 6).index_copy(-1, d2t, law)
    assert torch.equal(sample(logits.expand(SEEDS, 3, 6), d2t[drafts], full, method=method)[0], emitted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("op", [rejection_sample_reference, rejection_sample])
def test_repaired_rows_are_counted(temperature, op):
    """Rows that follow a draft count, and no others; −inf beside a finite logit is a law like any other."""
    logits, drafts = torch.randn(7, 3, 10, generator=torch.Generator().manual_seed(0)), torch.zeros(7, 2, dtype=torch.int64)
    logits[1, 1, 4] = math.nan
    logits[2] = -math.inf
    logits[3, :, :9] = -math.inf
    logits[4, 2, 0] = math.inf
    logits[5] = math.nan
    logits[6] = math.nan
    drafts[5] = -1
    drafts[6, 1] = -1
    repaired = sample(logits, drafts, None, temperature=temperature, op=op)[2]
    assert repaired.tolist() == [0, 1, 3, 0, 1, 1, 2]


def test_the_law_is_the_one_the_reference_uses():
    """A guard for the spies above: the operator's law comes from `token_law`."""
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    law = token_law_reference(logits, torch.ones(4), torch.zeros(4, dtype=torch.int64), torch.ones(4), torch.zeros(4))
    torch.testing.assert_close(law, logits.softmax(-1))
