"""Laws, draws, rejection, transforms and log-probabilities under the interpreter: the references' decisions, exactly."""

import math

import pytest
import torch
from rejection_cases import CASES, assert_valid

import stepgraph.kernels.rejection.launcher as launcher_module
import stepgraph.kernels.rejection.reference as reference_module
import stepgraph.kernels.row_law_triton as row_law_module
import stepgraph.kernels.sampling_triton as sampling_module
from stepgraph.kernels.launch import LaunchSpec, launch
from stepgraph.kernels.logprobs import record_logprobs_reference
from stepgraph.kernels.logprobs_triton import record_logprobs_triton
from stepgraph.kernels.philox import Stream, exponential, uniform
from stepgraph.kernels.rejection.decide import block_count, block_scales, standard_count, subtract_draft
from stepgraph.kernels.rejection.kernels import accept_kernel
from stepgraph.kernels.rejection.launcher import rejection_sample_triton
from stepgraph.kernels.rejection.reference import rejection_sample_reference
from stepgraph.kernels.row_law_triton import row_law
from stepgraph.kernels.sampling import draw_reference, token_law_reference
from stepgraph.kernels.sampling_triton import draw_triton, token_law_triton
from stepgraph.kernels.testing import guarded_allocations
from stepgraph.kernels.transforms import transform_logits_reference
from stepgraph.kernels.transforms_triton import transform_logits_triton


@pytest.fixture(autouse=True)
def _references(monkeypatch):
    monkeypatch.setattr(reference_module, "token_law", token_law_reference)
    monkeypatch.setattr(reference_module, "draw", draw_reference)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def parameters(rows, seed=0):
    """Temperature, top-k, top-p, min-p: each filter alone and all together, and greedy rows."""
    g = generator(seed)
    on = torch.rand(3, rows, generator=g) < 0.5
    return (
        torch.tensor([0.7, 1.0, 0.0, 1.6]).repeat(rows)[:rows],
        torch.where(on[0], torch.randint(1, 30, (rows,), generator=g), 0),
        torch.where(on[1], torch.rand(rows, generator=g).clamp(min=0.05), 1.0),
        torch.where(on[2], torch.rand(rows, generator=g) * 0.3, 0.0),
    )


def assert_laws(logits, *params):
    """Equal support, row by row and exactly, and probabilities up to rounding."""
    with guarded_allocations():
        law = token_law_triton(logits, *params)
    expected = token_law_reference(logits, *params)
    assert torch.equal(law > 0, expected > 0)
    torch.testing.assert_close(law, expected, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize(("rows", "vocab"), [(24, 10), (16, 1500)])
def test_token_law(rows, vocab):
    assert_laws(torch.randn(rows, vocab, generator=generator()) * 3, *parameters(rows))


def test_token_law_cuts_ties_by_id():
    """Logits in steps of 1/2: nearly every edge falls within a tie."""
    logits = (torch.randn(24, 1100, generator=generator(1)) * 2).round() / 2
    assert_laws(logits, *parameters(24, seed=1))


def test_token_law_of_non_finite_rows():
    """Case 8, and the codes that are counted."""
    logits = torch.randn(6, 10, generator=generator(2))
    logits[0], logits[1, 4], logits[4] = math.nan, math.nan, -math.inf
    logits[2, :7], logits[2, 8:] = -math.inf, -math.inf
    logits[3, 3] = math.inf
    for temperature in (0.0, 1.0):
        plain = (torch.full((6,), temperature), torch.zeros(6, dtype=torch.int64), torch.ones(6), torch.zeros(6))
        assert_laws(logits, *plain)
        assert (row_law(logits, *plain).repair != 0).tolist() == [True, True, False, True, True, False]


@pytest.fixture
def tiles(monkeypatch):
    """Sets how many tokens a tile has: the interpreter's time goes by tiles, and short rows should have several."""

    def of(size: int, of_program: int = 4) -> None:
        for module in (row_law_module, sampling_module, launcher_module):
            monkeypatch.setattr(module, "BLOCK", size)
        for module in (sampling_module, launcher_module):
            monkeypatch.setattr(module, "TILES", of_program)

    return of


def test_token_law_at_the_widest_vocabulary(tiles):
    tiles(16_384)
    logits = torch.randn(1, 262_144, generator=generator(3)).to(torch.float16)  # thousands of ties
    assert_laws(logits, torch.tensor([0.9]), torch.tensor([50]), torch.ones(1), torch.zeros(1))


def test_draws_are_the_references():
    weights = torch.randn(10, 4500, generator=generator(4)).softmax(-1)
    weights[0, 1:] = 0
    seed = torch.randint(0, 2**62, (10,), generator=generator(5))
    seed[1], position = 2**63 - 1, torch.arange(10) * 7
    args = (weights, seed, position + 1, position, int(Stream.TARGET))
    with guarded_allocations():
        assert torch.equal(draw_triton(*args), draw_reference(*args))


def window(batch, k, vocab, seed=0, reduced=False):
    g = generator(seed)
    logits = torch.randn(batch, k + 1, vocab, generator=g) * 2
    width = vocab // 2 if reduced else vocab
    d2t = torch.randperm(vocab, generator=g)[:width] if reduced else None
    law = torch.randn(batch, k, width, generator=g).mul(2).softmax(-1)
    drafts = torch.multinomial(law.reshape(-1, width), 1, generator=g).view(batch, k) if k else torch.zeros(batch, 0).long()
    drafts = d2t[drafts] if reduced else drafts
    if k:
        drafts[::5, 1:] = -1
        drafts[::7] = -1
        law[::7] = math.nan
    logits[3] = math.nan
    return logits, drafts, law, d2t


@pytest.mark.parametrize(("k", "vocab"), [(0, 12), (1, 10), (3, 70)])
@pytest.mark.parametrize("kind", ["sampled", "one-hot", "mixed", "reduced"])
def test_rejection(k, vocab, kind, tiles):
    """Rows of one tile, and of three in three programs."""
    tiles(32, of_program=1)
    batch = 6
    logits, drafts, law, d2t = window(batch, k, vocab, k, kind == "reduced")
    rows = torch.arange(batch)
    one_hot = rows % 3 == 1 if kind == "mixed" else None
    rates = torch.tensor([0.9, 0.7, 0.5]).expand(batch, 3)
    args = (logits, drafts, None if kind == "one-hot" else law, *parameters(batch), rows * 2**33 + 1, rows + 3)
    options = [(rows % 3, rates, one_hot, d2t)]
    if k == 1:  # a launcher of its own: no method at all
        options.append((None, None, one_hot, d2t))
    for extra in options:
        with guarded_allocations():
            actual = rejection_sample_triton(*args, *extra)
        for got, expected in zip(actual, rejection_sample_reference(*args, *extra), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("name", CASES)
def test_rejection_of_cornered_inputs(name, tiles):
    """Cases 7, 8 and 11, as the CPU is tested on them."""
    tiles(16)
    args = CASES[name]()
    with guarded_allocations():
        actual = rejection_sample_triton(*args)
    assert_valid(args, *actual)
    for got, expected in zip(actual, rejection_sample_reference(*args), strict=True):
        assert torch.equal(got, expected)


ROWS = 100_000


def test_decisions_over_many_rows():
    """The acceptance kernel itself on 10^5 requests, standard and block, against the specification with the same numbers.

    Rows in which a comparison falls within rounding of its threshold are masked, and there may be few of them.
    """
    k, vocab, g = 3, 6, generator(9)
    logits = torch.randn(ROWS, k + 1, vocab, generator=g) * 1.5
    law = (logits[:, :k] + torch.randn(ROWS, k, vocab, generator=g)).softmax(-1)
    drafts = torch.multinomial(law.view(-1, vocab), 1, generator=g).view(ROWS, k)
    drafts[torch.rand(ROWS, k, generator=g) < 0.05] = -1
    seed, base = torch.randint(0, 2**62, (ROWS,), generator=g), torch.randint(0, 10**6, (ROWS,), generator=g)
    method, ones = torch.arange(ROWS) % 2, torch.ones(ROWS)

    # The numbers of an unfiltered law, as `row_law_kernel` gives them.
    flat = logits.view(-1, vocab)
    largest = flat.amax(-1)
    total = (flat - largest[:, None]).exp().sum(-1)
    numbers = (
        largest,
        torch.full((len(flat),), 0x7F800000, dtype=torch.int32),
        torch.full((len(flat),), vocab, dtype=torch.int32),
    )
    p_all = token_law_reference(flat, ones.repeat_interleave(k + 1), flat[:, 0].long() * 0, largest * 0 + 1, largest * 0)
    p_all = p_all.view(ROWS, k + 1, vocab)
    drafted = (drafts >= 0).long().cumprod(-1) > 0
    token, count = drafts.clamp(min=0), drafted.sum(-1)
    p, q = (t[:, :k].gather(-1, token[..., None])[..., 0] for t in (p_all, law))
    scales = block_scales(p, q)
    left = torch.zeros(ROWS, k)
    left[:, : k - 1] = subtract_draft(scales[:, 1:k, None] * p_all[:, 1:k], token[:, 1:], law[:, 1:], None).sum(-1)
    u = uniform(seed[:, None], base[:, None] + 1 + torch.arange(k), base[:, None], Stream.ACCEPT)
    block = block_count(u, scales, p_all, token, law, None, count)
    expected = torch.where(method == 1, block, standard_count(u, p, q, drafted))

    accepted, repaired = torch.empty(ROWS, dtype=torch.int64), torch.empty(ROWS, dtype=torch.int64)
    scale, residual = torch.empty(ROWS), torch.empty(ROWS, dtype=torch.int32)
    lanes = 16_384
    launch(
        LaunchSpec(
            kernel=accept_kernel,
            grid=(-(-ROWS // lanes),),
            args={
                "logits_ptr": logits, "draft_tokens_ptr": drafts, "draft_law_ptr": law, "t2d_ptr": None,
                "temperature_ptr": ones, "seed_ptr": seed, "base_ptr": base, "method_ptr": method, "one_hot_ptr": None,
                "rates_ptr": None, "largest_ptr": numbers[0], "edge_ptr": numbers[1], "last_ptr": numbers[2],
                "total_ptr": total, "repair_ptr": torch.zeros(len(flat), dtype=torch.int32), "left_ptr": left,
                "accepted_ptr": accepted, "scale_ptr": scale, "residual_ptr": residual, "repaired_ptr": repaired,
                "batch": ROWS, "vocab": vocab, "width": vocab, "rates_stride": 0,
            },
            constexprs={
                "K": k, "HAS_LAW": True, "HAS_MAP": False, "HAS_ONE_HOT": False, "HAS_METHOD": True, "HAS_RATES": False,
                "ROWS": lanes,
            },
        )
    )  # fmt: skip
    # Standard rows compare u q with p, block rows u with s_n at their last draft and u (R + 1 − s) with R before it.
    inner, last = (u * (left + 1 - scales[:, 1:]) - left).abs(), torch.arange(1, k + 1) == count[:, None]
    close = torch.where(last, (u - scales[:, 1:]).abs() < 1e-6, (inner < 1e-6) & (left > 0))
    close = torch.where((method == 1)[:, None], close, (u * q - p).abs() < 1e-6 * p)
    knife_edge = (close & drafted).any(-1)
    assert knife_edge.sum() <= ROWS // 1000, int(knife_edge.sum())
    assert torch.equal(accepted[~knife_edge], expected[~knife_edge])
    assert torch.bincount(accepted).min() > ROWS // 100
    assert torch.equal(residual != 0, accepted < count)


def test_numbers_are_the_references():
    """A draw over weights 1 races on the very numbers: the winner has the smallest."""
    rows = torch.arange(12)
    tokens = draw_triton(torch.ones(12, 300), rows * 2**40, rows, rows * 3, int(Stream.DRAFT))
    assert torch.equal(tokens, exponential(rows * 2**40, rows, rows * 3, Stream.DRAFT, 300).argmin(-1))


def test_transforms():
    g, rows, vocab, k = generator(11), 5, 2100, 3
    state = (
        torch.randint(0, vocab, (rows, 700), generator=g),
        torch.tensor([True, False, True, True, False]),
        torch.tensor([3, 0, 300, 1, 0]),
        torch.tensor([0, 0, 652, 600, 0]),
        torch.tensor([1.3, 1.0, 0.7, 1.0, 1.0]),
        torch.tensor([0.5, 0.0, -0.25, 0.0, 0.0]),
        torch.tensor([0.125, 0.0, 1.5, 0.3, 0.0]),
        torch.tensor([[2, 2050, -1], [0, 1, 2], [-1, -1, -1], [7, 8, 9], [-1, -1, -1]]),
        torch.randn(rows, 3, generator=g),
        torch.tensor([[3, -1], [4, 5], [6, 2099], [0, 1], [-1, -1]]),
    )
    state[0][0, :40] = 2050
    drafts = torch.tensor([[2050, 2050, 5], [1, 2, 3], [9, -1, 9], [6, 6, 6]])
    slots, base = torch.tensor([0, 1, 2, 3]), torch.tensor([45, 10, 650, 599])
    logits = torch.randn(4, k + 1, vocab, generator=g)
    expected, actual = logits.clone(), logits.clone()
    transform_logits_reference(expected, drafts, slots, base, *state)
    transform_logits_triton(actual, drafts, slots, base, *state)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, logits)


def test_logprobs():
    g = generator(12)
    logits = torch.randn(3, 4, 2300, generator=g)
    logits[0, 1, 7], logits[0, 2, 9] = math.nan, math.inf
    emitted = torch.tensor([[4, 2, 9, -1], [1, 1, 1, 1], [0, -1, -1, -1]])
    args = (
        torch.tensor([1, 0, 3]),
        torch.tensor([5, 2, 0]),
        torch.tensor([False, True, False, False]),
        torch.tensor([6, 8, 0, 0]),
    )
    expected, actual = torch.full((4, 24), 0.5), torch.full((4, 24), 0.5)
    record_logprobs_reference(logits, emitted, *args, expected)
    record_logprobs_triton(logits, emitted, *args, actual)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(actual == 0.5, expected == 0.5)
