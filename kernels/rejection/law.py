"""The law laboratory: what rejection sampling emits, by enumeration in float64, for vocabularies small enough to enumerate.

A *model* here is a function from a prefix (a tuple of token ids) to the law of the next token, `[V]`. Nothing in this file
calls the operators it judges: it restates the algorithms as probabilities, so that one can be held against the other.

Sources: Leviathan et al. 2023 and Chen et al. 2023 (standard), Sun et al. 2024, "Block verification accelerates speculative
decoding" (block).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Model = Callable[[tuple[int, ...]], np.ndarray]
METHODS = ("standard", "block")


@dataclass(frozen=True)
class Verification:
    """What becomes of one draft sequence.

    Attributes:
        accepted: `[k+1]`, probability of each number of accepted drafts.
        final: `[k+1, V]`, law of the token that follows that many accepted drafts (zeros where it cannot happen).
        thresholds: `[k]`, draft i passes its own test when its uniform number is below this.
    """

    accepted: np.ndarray
    final: np.ndarray
    thresholds: np.ndarray


def residual(scale: float, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """max(scale p − q, 0), not normalised."""
    return np.maximum(scale * p - q, 0.0)


def verify(target: Model, draft: Model, drafts: Sequence[int], method: str = "standard") -> Verification:
    """Verification of `drafts`, which `draft` can have proposed, after the empty prefix.

    Raises:
        ValueError: an unknown method.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; allowed are {', '.join(METHODS)}")
    drafts, k = tuple(drafts), len(drafts)
    p = [np.asarray(target(drafts[:i]), dtype=np.float64) for i in range(k + 1)]
    q = [np.asarray(draft(drafts[:i]), dtype=np.float64) for i in range(k)]
    ratio = [p[i][token] / q[i][token] if q[i][token] > 0 else np.inf for i, token in enumerate(drafts)]
    scale = np.ones(k + 1)
    thresholds = np.zeros(k)
    if method == "standard":
        thresholds = np.minimum(ratio, 1.0) if k else thresholds
        passed = np.concatenate([[1.0], np.cumprod(thresholds)])
        accepted = passed - np.append(passed[1:], 0.0)
    else:
        for i in range(1, k + 1):
            scale[i] = min(scale[i - 1] * ratio[i - 1], 1.0)
            left = residual(scale[i], p[i], q[i]).sum() if i < k else scale[i]
            whole = left + 1 - scale[i] if i < k else 1.0
            # left = whole = 0: target and draft agree from here on, and a later draft is accepted for certain.
            thresholds[i - 1] = left / whole if whole > 0 else 0.0
        accepted = np.array([thresholds[i - 1] if i else 1.0 for i in range(k + 1)])
        accepted *= [np.prod(1 - thresholds[i:]) for i in range(k + 1)]
    final = np.zeros((k + 1, len(p[0])))
    final[k] = p[k]
    for i in range(k):
        left = residual(scale[i], p[i], q[i])
        final[i] = left / left.sum() if left.sum() > 0 else 0.0
    return Verification(accepted, final, thresholds)


def draft_sequences(draft: Model, k: int) -> dict[tuple[int, ...], float]:
    """Every sequence of k drafts that can be proposed, with its probability."""
    sequences: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(k):
        sequences = {
            (*prefix, token): mass * q
            for prefix, mass in sequences.items()
            for token, q in enumerate(np.asarray(draft(prefix), dtype=np.float64).tolist())
            if q > 0
        }
    return sequences


def target_law(target: Model, length: int) -> np.ndarray:
    """`[V] * length` array: the joint law of `length` tokens of the target."""
    vocab = len(target(()))
    joint = np.zeros((vocab,) * length)
    for sequence in itertools.product(range(vocab), repeat=length):
        joint[sequence] = np.prod([target(sequence[:i])[token] for i, token in enumerate(sequence)])
    return joint


def emitted_law(target: Model, draft: Model, k: int, method: str = "standard") -> tuple[np.ndarray, np.ndarray]:
    """The joint law of what a step emits, continued to k + 1 tokens by plain steps, and of the number of accepted drafts.

    Returns:
        `[V] * (k+1)` array and `[k+1]`. The method is lossless when the first equals `target_law(target, k + 1)`.
    """
    vocab = len(target(()))
    joint, lengths = np.zeros((vocab,) * (k + 1)), np.zeros(k + 1)
    for drafts, mass in draft_sequences(draft, k).items():
        outcome = verify(target, draft, drafts, method)
        lengths += mass * outcome.accepted
        for count in range(k + 1):
            for token in range(vocab):
                probability = mass * outcome.accepted[count] * outcome.final[count][token]
                if probability > 0:
                    _continue(target, joint, (*drafts[:count], token), probability)
    return joint, lengths


def _continue(target: Model, joint: np.ndarray, prefix: tuple[int, ...], mass: float) -> None:
    if len(prefix) == joint.ndim:
        joint[prefix] += mass
        return
    for token, p in enumerate(target(prefix)):
        if p > 0:
            _continue(target, joint, (*prefix, token), mass * float(p))


def expected_accepted(target: Model, draft: Model, k: int, method: str = "standard") -> float:
    """Expected number of accepted drafts, in closed form.

    standard: Σ_i Σ_x Π_{j≤i} min(p(x_j), q(x_j));   block: Σ_i Σ_x q(x) s_i(x) over x of i tokens, where
    s_i = min(s_{i−1} p(x_i) / q(x_i), 1) and s_0 = 1.
    """
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; allowed are {', '.join(METHODS)}")
    total = 0.0
    # prefix -> (probability that it is drafted and still stands, in the method's sense; probability that it is drafted)
    prefixes: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 1.0)}
    for _ in range(k):
        longer = {}
        for prefix, (stands, drafted) in prefixes.items():
            p, q = target(prefix), draft(prefix)
            for token in range(len(p)):
                if q[token] > 0:
                    both = drafted * float(q[token])
                    kept = stands * min(p[token], q[token]) if method == "standard" else min(stands * p[token], both)
                    longer[(*prefix, token)] = (float(kept), both)
        prefixes = longer
        total += sum(stands for stands, _ in prefixes.values())
    return total


def iid(law: Sequence[float]) -> Model:
    """The model that forgets its prefix."""
    fixed = np.asarray(law, dtype=np.float64)
    return lambda prefix: fixed


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    """Half the L1 distance between two laws."""
    return 0.5 * float(np.abs(np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)).sum())


def chi_square(counts: np.ndarray, law: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic of counts against a law, and its degrees of freedom; inf for a count outside the support."""
    counts, law = np.asarray(counts, dtype=np.float64).ravel(), np.asarray(law, dtype=np.float64).ravel()
    inside = law > 0
    if counts[~inside].any():
        return float("inf"), int(inside.sum()) - 1
    expected = law[inside] / law.sum() * counts.sum()
    return float(((counts[inside] - expected) ** 2 / expected).sum()), int(inside.sum()) - 1
