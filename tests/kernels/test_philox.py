"""Philox: known answers, the documented bit layout, independence, and the two number formats made from its words."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest

import stepgraph.kernels.philox as philox_module
from stepgraph.kernels.philox import Stream, exponential, philox, philox_numpy, philox_torch, uniform

ONES = 0xFFFFFFFF


def words(counter, key) -> list[int]:
    out = philox(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    return [int(word) for word in out]


def python_philox(counter, key) -> list[int]:
    """Philox4x32-10 in Python's unbounded integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & ONES, (p0 >> 32) ^ c3 ^ k1, p0 & ONES
        k0, k1 = (k0 + 0x9E3779B9) & ONES, (k1 + 0xBB67AE85) & ONES
    return [c0, c1, c2, c3]


def i64(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(counter, key, expected):
    assert words(counter, key) == list(expected)


@pytest.mark.parametrize("philox", [philox, philox_torch, philox_numpy])
def test_equals_unbounded_integers_and_broadcasts(philox):
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (64, 4)).tolist()
    keys = rng.integers(0, 2**32, (5, 2)).tolist()
    c = torch.tensor(counters)[:, None]
    k = torch.tensor(keys)[None]
    out = torch.stack(philox(tuple(c.unbind(-1)), tuple(k.unbind(-1))), -1)
    assert out.shape == (64, 5, 4)
    assert out.tolist() == [[python_philox(counter, key) for key in keys] for counter in counters]


SEEDS = [0, 1, 42, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63 - 1, -1, -(2**40) + 7]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stream", list(Stream))
def test_bit_layout(seed, stream):
    """Counter (entry / 4, position, base, stream), key the 64-bit seed; entry v has word v % 4."""
    key = (seed & ONES, (seed >> 32) & ONES)
    position, base, size = 70_001, 69_998, 10
    one = uniform(i64(seed), i64(position), i64(base), stream)
    assert one.dtype == torch.float32
    assert one.item() == (python_philox((0, position, base, int(stream)), key)[0] >> 8) / 2**24

    many = exponential(i64(seed), i64(position), i64(base), stream, size)
    assert many.dtype == torch.float64
    assert many.shape == (1, size)
    expected = [
        -math.log1p(-(python_philox((v // 4, position, base, int(stream)), key)[v % 4] + 0.5) / 2**32) for v in range(size)
    ]
    torch.testing.assert_close(many[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0)


def test_streams_are_the_documented_words():
    assert [int(stream) for stream in (Stream.DRAFT, Stream.ACCEPT, Stream.TARGET)] == [0, 1, 2]


def test_uniforms_are_exact_multiples_in_the_unit_interval():
    u = uniform(torch.arange(100_000), i64(3), i64(2), Stream.ACCEPT).double()
    assert u.min() >= 0
    assert u.max() <= 1 - 2.0**-24
    assert torch.equal(u * 2**24, (u * 2**24).round())
    assert kstest(u.numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(("word", "u", "e"), [(0, 0.0, -math.log1p(-(2.0**-33))), (ONES, 1 - 2.0**-24, 33 * math.log(2))])
def test_extreme_words(monkeypatch, word, u, e):
    """1.0 cannot occur, and neither can an exponential of 0 or infinity."""
    monkeypatch.setattr(philox_module, "philox", lambda counter, key: (torch.full_like(counter[0] + counter[1], word),) * 4)
    zero = i64(0)
    assert uniform(zero, zero, zero, Stream.ACCEPT).item() == u
    draws = exponential(zero, zero, zero, Stream.DRAFT, 6)
    assert (draws > 0).all()
    torch.testing.assert_close(draws, torch.full((1, 6), e, dtype=torch.float64), rtol=1e-14, atol=0)


def test_exponentials_have_their_law():
    draws = exponential(torch.arange(5000), torch.arange(5000) % 7, i64(0).expand(5000), Stream.TARGET, 13)
    assert draws.isfinite().all()
    assert (draws > 0).all()
    count = draws.numel()
    assert abs(draws.mean().item() - 1) < 4 / math.sqrt(count)
    assert abs(draws.var().item() - 1) < 4 * math.sqrt(8 / count)
    assert kstest(draws.flatten().numpy(), "expon").pvalue > 1e-3


N = 40_000
SEED, STEP, ZERO = torch.arange(N), torch.arange(N), torch.zeros(N, dtype=torch.int64)


def at(seed=SEED, position=5, base=4, stream=Stream.ACCEPT):
    return uniform(seed, ZERO + position, ZERO + base, stream)


def entry(index: int):
    return (-exponential(SEED, ZERO + 5, ZERO + 4, Stream.TARGET, 5)[:, index]).exp()


PAIRS = {
    "draft and accept": lambda: (at(stream=Stream.DRAFT), at()),
    "accept and target": lambda: (at(), at(stream=Stream.TARGET)),
    "draft and target": lambda: (at(stream=Stream.DRAFT), at(stream=Stream.TARGET)),
    "position": lambda: (at(), at(position=6)),
    "base": lambda: (at(), at(base=5)),
    "position and base swapped": lambda: (at(), at(position=4, base=5)),
    "next seed": lambda: (at(), at(seed=SEED + 1)),
    "high word of the seed": lambda: (at(), at(seed=SEED + 2**32)),
    "words of a lane": lambda: (entry(0), entry(1)),
    "lanes": lambda: (entry(0), entry(4)),
    "along positions": lambda: (at(ZERO + 42, STEP, 0), at(ZERO + 42, STEP, STEP)),
}


@pytest.mark.parametrize("name", list(PAIRS))
def test_numbers_of_different_purposes_are_independent(name):
    first, second = (t.double() for t in PAIRS[name]())
    assert (first == second).float().mean() < 1e-3
    cells = 16
    joint = torch.bincount((first * cells).long().clamp(max=15) * cells + (second * cells).long().clamp(max=15), minlength=256)
    expected = len(first) / cells**2
    assert ((joint - expected) ** 2 / expected).sum().item() < chi2.isf(1e-4, cells**2 - 1)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) < 4 / math.sqrt(len(first))


def test_no_two_counters_share_words():
    seed, position, base, stream = torch.meshgrid(
        i64(0, 1, 2**32, 2**32 + 1), torch.arange(6), torch.arange(6), torch.arange(3), indexing="ij"
    )
    counter = (torch.zeros_like(position), position, base, stream)
    out = torch.stack(philox(counter, (seed & ONES, seed >> 32)), -1).view(-1, 4)
    assert len(torch.unique(out, dim=0)) == len(out) == 4 * 6 * 6 * 3


def test_a_row_is_the_same_anywhere_and_a_vocabulary_is_a_prefix():
    seed, position, base = i64(5, 2**40, 7, -3, 42, 0, 9), torch.arange(7) + 10, torch.arange(7) * 3
    whole = exponential(seed, position, base, Stream.TARGET, 11)
    for row in range(7):
        one = slice(row, row + 1)
        alone = exponential(seed[one], position[one], base[one], Stream.TARGET, 11)
        assert torch.equal(alone[0], whole[row])
    for size in range(1, 11):
        assert torch.equal(exponential(seed, position, base, Stream.TARGET, size), whole[:, :size])
