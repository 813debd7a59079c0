"""Logit transforms: against one row at a time in plain Python, drafts of the window included (cases 34, 35)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.kernels.logprobs import record_logprobs, record_logprobs_reference
from stepgraph.kernels.transforms import transform_logits, transform_logits_reference

IMPLEMENTATIONS = [transform_logits_reference, transform_logits]
VOCAB, MAX_LEN, BIASES = 11, 24, 4


class Request:
    """One slot's parameters; the defaults do nothing."""

    def __init__(
        self, text=(1, 2, 3), prompt_len=2, repetition=1.0, frequency=0.0, presence=0.0, bias=None, stops=(), min_len=0
    ):
        self.text, self.prompt_len, self.min_len = list(text), prompt_len, min_len
        self.repetition, self.frequency, self.presence = repetition, frequency, presence
        self.bias, self.stops = bias or {}, list(stops)

    @property
    def active(self) -> bool:
        return bool(self.bias) or (self.repetition, self.frequency, self.presence) != (1, 0, 0) or self.min_len > 0

    def row(self, logits: list[float], drafts: list[int], i: int) -> list[float]:
        """The transformed row that follows the first i drafts."""
        valid = drafts[: next((j for j, d in enumerate(drafts) if d < 0), len(drafts))]
        text = self.text + valid[:i]
        answer, out = text[self.prompt_len :], []
        for token, value in enumerate(logits):
            value += self.bias.get(token, 0.0)
            if token in text:
                value = value / self.repetition if value > 0 else value * self.repetition
            value -= self.frequency * answer.count(token) + self.presence * (token in answer)
            if token in self.stops and len(self.text) + i < self.min_len:
                value = -math.inf
            out.append(value)
        return out


def apply(op, logits, drafts, requests):
    """Request b in slot b + 1; the last slot is the null one."""
    rows = len(requests) + 2
    ints = {name: torch.zeros(rows, dtype=torch.int64) for name in ("prompt_len", "min_len")}
    floats = {"repetition": torch.ones(rows), "frequency": torch.zeros(rows), "presence": torch.zeros(rows)}
    history, transformed = torch.full((rows, MAX_LEN), 7), torch.zeros(rows, dtype=torch.bool)
    bias_ids, bias_values = torch.full((rows, BIASES), -1), torch.zeros(rows, BIASES)
    stop_ids = torch.full((rows, 3), -1)
    for slot, r in enumerate(requests, 1):
        history[slot, : len(r.text)] = torch.tensor(r.text)
        transformed[slot] = r.active
        for name, tensor in (ints | floats).items():
            tensor[slot] = getattr(r, name)
        for j, (token, value) in enumerate(r.bias.items()):
            bias_ids[slot, j], bias_values[slot, j] = token, value
        stop_ids[slot, : len(r.stops)] = torch.tensor(r.stops)
    base = torch.tensor([len(r.text) - 1 for r in requests])
    slots = torch.arange(len(requests)) + 1
    op(
        logits, drafts, slots, base, history, transformed, *ints.values(), *floats.values(), bias_ids, bias_values, stop_ids
    )  # fmt: skip
    return logits


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_case_35_each_row_sees_the_drafts_before_it(op):
    request = Request(text=[5, 5, 1], prompt_len=3, frequency=1.0)
    out = apply(op, torch.zeros(1, 4, VOCAB), torch.tensor([[5, 5, 5]]), [request])
    assert out[0, :, 5].tolist() == [0, -1, -2, -3]
    # After a rejection at row 1 the text is [5, 5, 1, 5, 2]: only what is committed counts.
    request.text += [5, 2]
    out = apply(op, torch.zeros(1, 4, VOCAB), torch.tensor([[-1, -1, -1]]), [request])
    assert out[0, :, 5].tolist() == [-1] * 4
    assert out[0, 0, 2] == -1


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_case_34_stop_ids_wait_for_min_tokens(op):
    """min_tokens = 4 with 2 generated, k = 3: rows 0 and 1 only."""
    request = Request(text=[1, 2, 3, 4, 5], prompt_len=3, stops=[9, 0], min_len=3 + 4)
    out = apply(op, torch.zeros(1, 4, VOCAB), torch.tensor([[3, 3, 3]]), [request])
    masked = out[0] == -math.inf
    assert masked[:, [0, 9]].all(1).tolist() == [True, True, False, False]
    assert masked.sum() == 4


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_others_keep_their_bytes(op):
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 3, VOCAB, generator=g)
    logits[0, 0, 0], logits[2, 1, 1] = math.nan, -math.inf
    before = logits.clone()
    apply(op, logits, torch.tensor([[1, 2], [3, -1], [4, 4]]), [Request(), Request(frequency=0.5), Request()])
    assert torch.equal(logits[[0, 2]].view(torch.int32), before[[0, 2]].view(torch.int32))
    assert not torch.equal(logits[1], before[1])


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
def test_ids_that_the_vocabulary_does_not_have_change_nothing(op):
    request = Request(bias={VOCAB: 3.0, 2**40: 1.0, 4: 2.0}, stops=[VOCAB + 5, -7], min_len=20)
    out = apply(op, torch.zeros(1, 2, VOCAB), torch.tensor([[1]]), [request])
    assert out.sum() == 4
    assert (out[0, :, 4] == 2).all()


tokens = st.integers(0, VOCAB - 1)
requests = st.builds(
    Request,
    text=st.lists(tokens, min_size=2, max_size=12),
    prompt_len=st.integers(1, 2),
    repetition=st.sampled_from([1.0, 0.5, 2.0]),
    frequency=st.sampled_from([0.0, 0.25, -0.5]),
    presence=st.sampled_from([0.0, 1.5, -0.25]),
    bias=st.dictionaries(tokens, st.sampled_from([-100.0, 2.5, 0.125]), max_size=BIASES),
    stops=st.lists(tokens, max_size=3, unique=True),
    min_len=st.integers(0, 16),
)


@pytest.mark.parametrize("op", IMPLEMENTATIONS)
@settings(max_examples=40, deadline=None)
@given(some=st.lists(requests, min_size=1, max_size=3), k=st.integers(0, 3), data=st.data())
def test_against_plain_python(op, some, k, data):
    drafts = [data.draw(st.lists(st.integers(-1, VOCAB - 1), min_size=k, max_size=k)) for _ in some]
    logits = torch.randn(len(some), k + 1, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = [[r.row(logits[b, i].tolist(), drafts[b], i) for i in range(k + 1)] for b, r in enumerate(some)]
    actual = apply(op, logits.clone(), torch.tensor(drafts, dtype=torch.int64).view(len(some), k), some)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", [record_logprobs_reference, record_logprobs])
def test_case_36_each_emitted_token_has_an_entry_from_its_own_row(op):
    logits = torch.randn(3, 4, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[2] = math.nan
    emitted = torch.tensor([[4, 2, 9, -1], [1, 1, 1, 1], [0, -1, -1, -1]])
    slots, wanted = torch.tensor([1, 0, 3]), torch.tensor([False, True, False, False])
    base, seq_len = torch.tensor([5, 2, 0]), torch.tensor([6, 8, 0, 0])
    out = torch.full((4, MAX_LEN), 0.5)
    op(logits, emitted, slots, base, wanted, seq_len, out)
    law = logits[0].log_softmax(-1)
    assert out[1, 6:9].tolist() == [law[0, 4], law[1, 2], law[2, 9]]
    out[1, 6:9] = 0.5
    assert (out == 0.5).all()
