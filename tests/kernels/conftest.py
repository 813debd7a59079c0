"""Shared by the kernel tests: a law checked by chi-square, and the sampling law in plain Python."""

import math

import numpy as np
import pytest
from scipy.stats import chi2


def _statistic(tokens, law) -> float:
    """Pearson's statistic of `tokens` (any integers, flattened) against `law` over 0 .. V-1; inf outside the support."""
    law = np.asarray(law, dtype=np.float64).ravel()
    tokens = np.asarray(tokens).ravel()
    if tokens.min() < 0 or tokens.max() >= law.size:
        return math.inf
    counts = np.bincount(tokens, minlength=law.size)
    if counts[law == 0].any():
        return math.inf
    expected = law[law > 0] / law.sum() * tokens.size
    return float(((counts[law > 0] - expected) ** 2 / expected).sum())


@pytest.fixture(scope="session")
def chi_square():
    return _statistic


@pytest.fixture(scope="session")
def assert_law():
    """Samples at fixed seeds follow a law: no token outside its support, and a statistic that 1 in 10,000 would exceed."""

    def check(tokens, law) -> None:
        dof = int((np.asarray(law) > 0).sum()) - 1
        bound = chi2.isf(1e-4, dof) if dof else 1e-9
        assert _statistic(tokens, law) < bound

    return check


def _law(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    """The contract of `token_law`, one row, in float64 and without a library."""
    vocab = range(len(logits))
    x = [-math.inf if math.isnan(v) else float(v) for v in logits]
    if math.inf in x:
        x = [0.0 if v == math.inf else -math.inf for v in x]
    if all(v == -math.inf for v in x):
        x = [0.0 for _ in vocab]
    ranked = sorted(vocab, key=lambda i: (-x[i], i))
    if temperature <= 0:
        return [1.0 if i == ranked[0] else 0.0 for i in vocab]

    def normalised(kept):
        weights = {i: math.exp((x[i] - x[ranked[0]]) / temperature) for i in kept}
        total = math.fsum(weights.values())
        return {i: w / total for i, w in weights.items()}

    law = normalised(vocab)
    kept = [i for i in ranked if law[i] >= min_p * law[ranked[0]]]
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        law, mass, count = normalised(kept), 0.0, 0
        while mass < top_p and count < len(kept):
            mass += law[kept[count]]
            count += 1
        kept = kept[:count]
    law = normalised(kept)
    return [law.get(i, 0.0) for i in vocab]


@pytest.fixture(scope="session")
def law_oracle():
    return _law


@pytest.fixture
def fast_law(monkeypatch):
    """The vectorised reference law in place of the row-by-row CPU one; test_sampling shows that their bits are equal."""
    import stepgraph.kernels.rejection.reference as rejection_module
    from stepgraph.kernels.sampling import token_law_reference

    monkeypatch.setattr(rejection_module, "token_law", token_law_reference)
