"""`rejection_sample` as the tests call it, and cornered inputs for every implementation of it."""

import math

import torch

from stepgraph.kernels.philox import Stream
from stepgraph.kernels.rejection import Verify, rejection_sample
from stepgraph.kernels.sampling import draw

NAN, INF = math.nan, math.inf


def run(logits, drafts, law=None, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=None, base=7):
    """`rejection_sample` with parameters given as one value or as one per row."""
    rows = logits.shape[0]

    def per_row(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous()

    emitted, accepted, _ = rejection_sample(
        logits,
        drafts,
        law,
        per_row(temperature, torch.float32),
        per_row(top_k, torch.int64),
        per_row(top_p, torch.float32),
        per_row(min_p, torch.float32),
        torch.arange(rows) if seed is None else per_row(seed, torch.int64),
        per_row(base, torch.int64),
    )
    k = logits.shape[1] - 1
    assert emitted.shape == (rows, k + 1)
    assert accepted.shape == (rows,)
    assert emitted.dtype == accepted.dtype == torch.int64
    # Whatever happened: the accepted drafts, one token of the vocabulary, then −1.
    column = torch.arange(k + 1)
    assert ((accepted >= 0) & (accepted <= k)).all()
    assert torch.equal(emitted[:, :k][column[:k] < accepted[:, None]], drafts[column[:k] < accepted[:, None]])
    final = emitted.gather(1, accepted[:, None])
    assert ((final >= 0) & (final < logits.shape[2])).all()
    assert (emitted[column > accepted[:, None]] == -1).all()
    return emitted, accepted


def drafted(law, column: int = 0, base: int = 7, stream: Stream = Stream.DRAFT):
    """Drafts of seeds 0 .. N − 1 for `law [N, V]`, as a drafter draws them."""
    rows = torch.arange(law.shape[0])
    return draw(law, rows, torch.full_like(rows, base + 1 + column), torch.full_like(rows, base), int(stream))


def arguments(batch: int, k: int, vocab: int, seed: int = 0, **changes) -> list:
    """Sampled drafts of plain requests; `changes` replaces arguments, by one value for all rows or by a tensor."""
    g = torch.Generator().manual_seed(seed)
    law = torch.randn(batch, k, vocab, generator=g).softmax(-1)
    drafts = torch.randint(0, vocab, (batch, k), generator=g)
    values = {
        "logits": torch.randn(batch, k + 1, vocab, generator=g) * 2,
        "draft_tokens": drafts,
        "draft_law": law,
        "temperature": torch.ones(batch),
        "top_k": torch.zeros(batch, dtype=torch.int64),
        "top_p": torch.ones(batch),
        "min_p": torch.zeros(batch),
        "seed": torch.arange(batch) * 2**33 + 5,
        "base": torch.arange(batch) + 3,
        "method": torch.zeros(batch, dtype=torch.int64),
        "rates": torch.tensor([0.8, 0.5, 0.2, 0.9]).expand(batch, 4),
        "one_hot": None,
        "d2t": None,
    }
    for name, value in changes.items():
        like = values[name]
        values[name] = value if value is None or isinstance(value, torch.Tensor) else torch.full_like(like, value)
    return list(values.values())


def with_drafts(columns: list[list[int]], vocab: int = 9, **changes) -> list:
    return arguments(len(columns), len(columns[0]), vocab, draft_tokens=torch.tensor(columns), **changes)


def broken_rows(temperature: float) -> list:
    args = arguments(6, 2, 10, temperature=temperature)
    logits = args[0]
    logits[0] = NAN
    logits[1, :, 4] = NAN
    logits[2] = -INF
    logits[3], logits[3, :, 7] = -INF, 1.0
    logits[4, :, 3] = INF
    logits[5, :, 2:5], logits[5, 1] = INF, -INF
    return args


def broken_laws() -> list:
    args = arguments(4, 2, 9)
    law = args[2]
    law[0], law[1], law[2, :, 4], law[3, :, 1] = 0.0, NAN, NAN, INF
    return args


def every_kind() -> list:
    """Greedy and sampled rows × methods × one-hot and sampled drafts, with a different filter each."""
    rows = torch.arange(12)
    args = arguments(
        12, 3, 9, temperature=torch.where(rows % 4 == 3, 0.0, 0.9), method=rows % 3, one_hot=rows % 5 == 1,
        top_k=rows % 7, top_p=torch.where(rows % 2 == 0, 0.8, 1.0), min_p=torch.where(rows % 6 == 5, 0.1, 0.0),
    )  # fmt: skip
    args[1][3] = args[0][3, :3].argmax(-1)
    return args


def last_seeds() -> list:
    args = arguments(3, 2, 9)
    args[7] = torch.tensor([2**63 - 1, -(2**63), -1])
    return args


METHODS = torch.tensor([Verify.STANDARD, Verify.BLOCK, Verify.SYNTHETIC])
CASES = {
    "all greedy": lambda: arguments(3, 2, 9, temperature=0.0),
    "all greedy, every method": lambda: arguments(3, 2, 9, temperature=0.0, method=METHODS),
    "every kind of row": every_kind,
    "no drafts": lambda: arguments(3, 0, 9),
    "no rows": lambda: arguments(0, 2, 9),
    "no rows, greedy": lambda: arguments(0, 2, 9, temperature=0.0),
    "one token": lambda: arguments(3, 2, 1, method=METHODS),
    "one token, filtered": lambda: arguments(2, 2, 1, top_k=1, top_p=0.1, min_p=1.0),
    "broken rows": lambda: broken_rows(1.0),
    "broken rows, greedy": lambda: broken_rows(0.0),
    "broken laws": broken_laws,
    "broken laws, block": lambda: [*broken_laws()[:9], torch.ones(4, dtype=torch.int64), *broken_laws()[10:]],
    "laws of zeros, one-hot": lambda: arguments(3, 2, 9, draft_law=0.0, one_hot=torch.tensor([True, False, True])),
    "coldest": lambda: arguments(3, 2, 9, temperature=1e-45),
    "hottest": lambda: arguments(3, 2, 9, temperature=100.0),
    "least top-p": lambda: arguments(3, 2, 9, top_p=1e-9),
    "most top-p": lambda: arguments(3, 2, 9, top_p=1 - 2.0**-24),
    "top-k beyond the vocabulary": lambda: arguments(3, 2, 9, top_k=2**63 - 1),
    "min-p of one": lambda: arguments(3, 2, 9, min_p=1.0),
    "last seeds": last_seeds,
    "drafts missing in the middle": lambda: with_drafts([[1, -1, 3], [-1, 2, 3], [1, 2, -1]], method=METHODS),
    "drafts outside the vocabulary": lambda: with_drafts([[1, 9, 3], [2**40, 2, 3], [-7, 2, 3]], method=METHODS, rates=1.0),
    "every draft accepted": lambda: arguments(3, 3, 9, method=2, rates=1.0),
    "no draft accepted": lambda: arguments(3, 3, 9, method=2, rates=0.0),
}


def assert_valid(args: list, emitted: torch.Tensor, accepted: torch.Tensor, repaired: torch.Tensor) -> None:
    """What holds whatever the inputs: accepted drafts, one token of the vocabulary, then −1."""
    logits, drafts = args[0], args[1]
    batch, query_len, vocab = logits.shape
    column = torch.arange(query_len)
    inside = ((drafts >= 0) & (drafts < vocab)).long().cumprod(-1).sum(-1)
    assert emitted.shape == (batch, query_len)
    assert ((accepted >= 0) & (accepted <= inside)).all()
    assert ((repaired >= 0) & (repaired <= inside + 1)).all()
    assert torch.equal(emitted == -1, column > accepted[:, None])
    assert (emitted < vocab).all()
    kept = column[:-1] < accepted[:, None]
    assert torch.equal(emitted[:, :-1][kept], drafts[kept])
