"""Rejection sampling: the exact joint law of what is emitted, by enumeration of drafts and uniforms on tiny vocabularies."""

import itertools
import math

import numpy as np
import pytest
import torch
from rejection_cases import run

import stepgraph.kernels.rejection.reference as rejection_module


class ExactLaw:
    """Runs the algorithm for every draft sequence and every cell of a grid of uniforms that is fine enough to be exact.

    Laws are multiples of 1/8 (target) and 1/2 or 1/4 (draft), so that every threshold p/q is a multiple of 1/8: with
    uniforms at the cells' midpoints, counting cells integrates over u. The final draw is replaced by its weights.
    """

    vocab, cells = 3, 8

    def __init__(self, monkeypatch, k: int, seed: int):
        rng = np.random.default_rng(seed)
        self.patch, self.k = monkeypatch, k
        prefixes = [p for n in range(k + 1) for p in itertools.product(range(self.vocab), repeat=n)]
        eighths = [c for c in itertools.product(range(9), repeat=self.vocab) if sum(c) == 8]
        draft_laws = [p for base in ((4, 2, 2), (4, 4, 0), (8, 0, 0)) for p in sorted(set(itertools.permutations(base)))]
        self.target = {p: np.array(eighths[rng.integers(len(eighths))]) / 8 for p in prefixes}
        self.draft = {p: np.array(draft_laws[rng.integers(len(draft_laws))]) / 8 for p in prefixes}

    def run(self, sequences, law_of=None, lengths=None):
        """Probability of each continuation over k + 1 tokens, and of each number of accepted drafts.

        Args:
            sequences: {draft sequence (−1 for none): its probability}.
            law_of: prefix -> draft law handed to the op, or None for one-hot drafts.
        """
        k, vocab = self.k, self.vocab
        grid = list(itertools.product((np.arange(self.cells) + 0.5) / self.cells, repeat=k))
        rows = [(d, u) for d in sequences for u in grid]
        logits = torch.tensor(
            np.array([[self.target[tuple(max(t, 0) for t in d[:i])] for i in range(k + 1)] for d, _ in rows])
        ).log()
        drafts = torch.tensor([d for d, _ in rows])
        law = None
        if law_of is not None:
            law = torch.tensor(np.array([[law_of(tuple(max(t, 0) for t in d[:i])) for i in range(k)] for d, _ in rows]))
        uniforms = torch.tensor([u for _, u in rows], dtype=torch.float64)
        weights = []

        def spy(w, *_):
            weights.append(w)
            return w.argmax(-1)

        self.patch.setattr(rejection_module, "uniform", lambda seed, position, base, stream: uniforms)
        self.patch.setattr(rejection_module, "draw", spy)
        _, accepted = run(logits, drafts, law)
        final = (weights[0] / weights[0].sum(-1, keepdim=True)).numpy()

        joint, lengths = {}, np.zeros(k + 1)
        for (d, _), a, last in zip(rows, accepted.tolist(), final, strict=True):
            mass = sequences[d] / len(grid)
            lengths[a] += mass
            for token in range(vocab):
                if last[token] > 0:
                    self._continue(joint, (*d[:a], token), mass * last[token])
        return joint, lengths

    def _continue(self, joint, prefix, mass):
        """What the following plain steps add: tokens of the target until there are k + 1."""
        if len(prefix) == self.k + 1:
            joint[prefix] = joint.get(prefix, 0.0) + mass
            return
        for token, p in enumerate(self.target[prefix]):
            if p > 0:
                self._continue(joint, (*prefix, token), mass * p)

    def sampled_sequences(self):
        sequences = {(): 1.0}
        for _ in range(self.k):
            sequences = {
                (*d, token): mass * q for d, mass in sequences.items() for token, q in enumerate(self.draft[d]) if q > 0
            }
        return sequences

    def assert_joint_is_the_target(self, joint):
        for sequence in itertools.product(range(self.vocab), repeat=self.k + 1):
            expected = math.prod(self.target[sequence[:i]][token] for i, token in enumerate(sequence))
            assert joint.get(sequence, 0.0) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [1, 2])
class TestExactJointLaw:
    def test_sampled_drafts(self, monkeypatch, fast_law, k, seed):
        exact = ExactLaw(monkeypatch, k, seed)
        joint, lengths = exact.run(exact.sampled_sequences(), exact.draft.__getitem__)
        exact.assert_joint_is_the_target(joint)
        # The first draft is accepted with probability Σ min(p, q), no less and no more.
        assert 1 - lengths[0] == pytest.approx(np.minimum(exact.target[()], exact.draft[()]).sum(), abs=1e-12)

    def test_one_hot_drafts(self, monkeypatch, fast_law, k, seed):
        exact = ExactLaw(monkeypatch, k, seed)
        tokens = np.random.default_rng(seed).integers(0, 3, k)
        d = tuple(int(t) for t in tokens)
        joint, lengths = exact.run({d: 1.0})
        exact.assert_joint_is_the_target(joint)
        assert 1 - lengths[0] == pytest.approx(exact.target[()][d[0]], abs=1e-12)

        one_hot = np.eye(3)
        again, again_lengths = exact.run({d: 1.0}, lambda prefix: one_hot[d[len(prefix)]])
        assert again == joint
        assert (again_lengths == lengths).all()

    def test_no_draft_from_some_column_on(self, monkeypatch, fast_law, k, seed):
        """Case 11: the law is the target's, and no more is accepted than was drafted."""
        exact = ExactLaw(monkeypatch, k, seed)
        for drafts in range(k):
            short = {d[:drafts]: 0.0 for d in exact.sampled_sequences()}
            for d, mass in exact.sampled_sequences().items():
                short[d[:drafts]] += mass
            sequences = {(*d, *[-1] * (k - drafts)): mass for d, mass in short.items()}
            joint, lengths = exact.run(sequences, exact.draft.__getitem__)
            exact.assert_joint_is_the_target(joint)
            assert (lengths[drafts + 1 :] == 0).all()


def test_exact_joint_law_of_three_drafts(monkeypatch, fast_law):
    monkeypatch.setattr(ExactLaw, "vocab", 2)
    exact = ExactLaw(monkeypatch, 3, 0)
    laws = [(2, 6), (4, 4), (6, 2), (1, 7), (3, 5)]
    for index, prefix in enumerate(exact.target):
        exact.target[prefix] = np.array(laws[index % 5]) / 8
        exact.draft[prefix] = np.array([0.5, 0.5])
    joint, lengths = exact.run(exact.sampled_sequences(), exact.draft.__getitem__)
    exact.assert_joint_is_the_target(joint)
    assert (lengths > 0).all()
