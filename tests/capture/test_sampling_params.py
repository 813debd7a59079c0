"""What a request may ask for, through whole captured steps: transforms, log-probabilities, stop strings, verification."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import tiny_model, tiny_step

from stepgraph.capture.engine import Engine
from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.policies import make_policy
from stepgraph.capture.request import FinishReason, SamplingParams
from stepgraph.capture.stops import StopStrings

PROMPTS = ([3, 1, 4, 1, 5, 9, 3, 1, 4], [7, 7, 7, 2, 7, 7])
DRAFTERS = ("ngram", "early-exit:1", "draft-model:tiny")


class Letters:
    """A tokenizer of one letter a token."""

    def encode(self, text):
        return [ord(letter) - 65 for letter in text]

    def decode(self, ids):
        return "".join(chr(65 + token) for token in ids)


def engine(drafter="none", k=0, *, tokenizer=None, invariant=True, **options):
    model = tiny_model(invariant=invariant)
    step = tiny_step(drafter, model=model, num_slots=2, max_len=64, k_max=max(k, 1), draft_seed=1)
    policy = make_policy(k)
    return Engine(StepGraphs(step, policy.keys(2)), policy, tokenizer=tokenizer, **options)


def texts(params, drafter="none", k=0, **options):
    return engine(drafter, k, **options).generate(list(PROMPTS), params)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("verify", ["standard", "block"])
def test_greedy_text_with_every_transform_equals_plain_greedy(drafter, verify):
    """The penalties of row i see the drafts before it, so speculation changes nothing."""
    params = SamplingParams(
        max_new_tokens=20, min_tokens=6, stop_ids=(17, 4, 29), logit_bias={5: 1.5, 9: -100.0}, repetition_penalty=1.3,
        frequency_penalty=0.4, presence_penalty=0.2, logprobs=True, verify=verify,
    )  # fmt: skip
    for plain, fast in zip(texts(params), texts(params, drafter, 3), strict=True):
        assert fast.token_ids == plain.token_ids
        assert fast.finish_reason == plain.finish_reason
        torch.testing.assert_close(torch.tensor(fast.logprobs), torch.tensor(plain.logprobs), rtol=1e-5, atol=1e-6)
        assert 9 not in plain.token_ids
        assert not {17, 4, 29} & set(plain.token_ids[:5])
    assert texts(SamplingParams(max_new_tokens=20))[0].token_ids != texts(params)[0].token_ids


def test_logprobs_are_those_of_the_model():
    """Case 36: an entry per emitted token, each from the row that the token was drawn from."""
    out = texts(SamplingParams(max_new_tokens=6, temperature=0.8, logprobs=True))[0]
    again = engine()
    for index, (token, logprob) in enumerate(zip(out.token_ids, out.logprobs, strict=True)):
        one = SamplingParams(max_new_tokens=1, logprobs=True, logit_bias={token: 100.0})
        biased = again.generate([PROMPTS[0] + out.token_ids[:index]], one)[0]
        assert biased.token_ids == [token]
        assert logprob < 0
        assert math.isclose(biased.logprobs[0], 0.0, abs_tol=1e-4)
    assert texts(SamplingParams(max_new_tokens=3))[0].logprobs is None


@pytest.mark.parametrize(("drafter", "k"), [("none", 0), ("draft-model:tiny", 3), ("ngram", 3)])
def test_stop_strings_trim_what_follows(drafter, k):
    letters = Letters()
    prompts = [letters.decode(PROMPTS[0])]
    whole = engine(drafter, k, tokenizer=letters).generate(prompts, SamplingParams(max_new_tokens=16))[0]
    for at in (0, 3, 6, 14):
        stop = whole.text[at : at + 2]
        at = whole.text.index(stop)
        pieces = []
        out = engine(drafter, k, tokenizer=letters).generate(
            prompts,
            SamplingParams(max_new_tokens=16, stop=(stop, "never"), logprobs=True),
            on_text=lambda _, t, pieces=pieces: pieces.append(t),
        )[0]
        assert out.finish_reason is FinishReason.STOP
        assert out.text == whole.text[:at] == "".join(pieces)
        assert out.token_ids == whole.token_ids[: at + 2]
        assert len(out.logprobs) == len(out.token_ids)
        # Every step emits one token beside its accepted drafts, except where a draft completed the stop string.
        assert sum(out.accepted_at) in (len(out.token_ids) - out.steps, len(out.token_ids) - out.steps + 1)


@pytest.mark.parametrize(("drafter", "k"), [("none", 0), ("draft-model:tiny", 3)])
def test_case_34_stop_strings_wait_for_min_tokens(drafter, k):
    """A stop string within the first min_tokens tokens is text; one that a later token completes ends the request."""
    letters = Letters()
    prompts = [letters.decode(PROMPTS[0])]
    whole = engine(drafter, k, tokenizer=letters).generate(prompts, SamplingParams(max_new_tokens=16))[0]
    for at in (1, 4):
        stop = whole.text[at : at + 2]
        first = whole.text.index(stop) + 2  # tokens up to and with the one that completes it
        for min_tokens in (first - 1, first, 16):
            params = SamplingParams(max_new_tokens=16, stop=(stop,), min_tokens=min_tokens)
            out = engine(drafter, k, tokenizer=letters).generate(prompts, params)[0]
            later = whole.text.find(stop, max(0, min_tokens - 1))
            assert out.text == (whole.text if later < 0 else whole.text[:later])
            assert len(out.token_ids) == (16 if later < 0 else later + 2)
            assert out.finish_reason is (FinishReason.LENGTH if later < 0 else FinishReason.STOP)


@given(
    st.text("abc", max_size=20), st.integers(0, 20), st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3)
)
def test_stop_strings_that_are_complete_too_early_are_text(text, min_tokens, stops):
    cutter, out = StopStrings(stops), ""
    for index, letter in enumerate(text):
        out += cutter.push(letter, index >= min_tokens)
        if cutter.found:
            break
    ends = [at + len(stop) for stop in stops for at in range(len(text)) if text.startswith(stop, at)]
    end = min((end for end in ends if end > min_tokens), default=None)
    assert cutter.found == (end is not None)
    if end is None:
        assert out + cutter.flush() == text
    else:
        longest = max(len(stop) for stop in stops if text[:end].endswith(stop))
        assert out == text[: end - longest]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=2), st.integers(1, 4))
def test_stop_strings_do_not_depend_on_the_pieces(text, stops, size):
    cutter, out = StopStrings(stops), ""
    for start in range(0, len(text), size):
        out += cutter.push(text[start : start + size])
        if cutter.found:
            break
    whole, expected = StopStrings(stops), ""
    for letter in text:
        expected += whole.push(letter)
        if whole.found:
            break
    assert cutter.found == whole.found == any(stop in text for stop in stops)
    if not cutter.found:
        assert out + cutter.flush() == text
    elif size == 1:
        assert out == expected


@pytest.mark.parametrize("verify", ["standard", "block"])
def test_a_seed_decides_whatever_the_neighbours(verify):
    params = SamplingParams(max_new_tokens=12, temperature=0.9, seed=42, verify=verify, frequency_penalty=0.5)
    alone = engine("early-exit:1", 3).generate([PROMPTS[0]], params)[0]
    both = engine("early-exit:1", 3).generate([PROMPTS[1], PROMPTS[0]], params)[1]
    assert alone.token_ids == both.token_ids


def test_block_verification_accepts_at_least_as_much():
    params = SamplingParams(max_new_tokens=40, temperature=1.0)
    rates = {}
    for verify in ("standard", "block"):
        outputs = engine("early-exit:1", 4, verify=verify).generate([list(PROMPTS[0])] * 6, params)
        rates[verify] = sum(len(out.token_ids) for out in outputs) / sum(out.steps for out in outputs)
    assert rates["block"] > rates["standard"] - 0.1


def test_synthetic_acceptance_warns_and_obeys():
    with pytest.warns(UserWarning, match="synthetic"):
        fast = engine("ngram", 2, synthetic_rates=(1.0, 0.0))
    out = fast.generate([[7] * 12], SamplingParams(max_new_tokens=20))[0]
    assert out.accepted_at[0] >= out.drafted_at[0] - 1
    assert out.accepted_at[1] == 0
    with pytest.raises(ValueError, match=r"synthetic_rates has 1 entries; the policy may ask k=2"):
        engine("ngram", 2, synthetic_rates=(1.0,))


def test_repaired_rows_reach_the_report():
    broken = engine()
    with torch.no_grad():
        broken.graphs.step.target.norm.fill_(math.nan)
    out = broken.generate([list(PROMPTS[0])], SamplingParams(max_new_tokens=3))[0]
    assert out.repaired == 3
    assert broken.report()["repaired_rows"] == 3
    assert engine().generate([list(PROMPTS[0])], SamplingParams(max_new_tokens=3))[0].repaired == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_tokens": 65}, "min_tokens is 65; it must be an integer from 0 to 64"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"logit_bias": {3: 101.0}}, r"logit_bias of token 3 is 101.0; allowed is a number in \[-100, 100\]"),
        ({"logit_bias": {-1: 1.0}}, "a token id of logit_bias is -1"),
        ({"logit_bias": dict.fromkeys(range(129), 1.0)}, "logit_bias has 129 entries; at most 128"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]; allowed"),
        ({"repetition_penalty": 0}, r"repetition_penalty is 0; allowed is a number in \(0, 10\]"),
        ({"frequency_penalty": 2.1}, r"frequency_penalty is 2.1; allowed is a number in \[-2, 2\]"),
        ({"presence_penalty": math.nan}, "presence_penalty is nan"),
        ({"stop": "end"}, "stop is 'end'; allowed are sequences of non-empty strings"),
        ({"stop": ("",)}, r"stop is \('',\)"),
        ({"logprobs": 1}, "logprobs is 1; allowed are True and False"),
        ({"ignore_eos": 3}, "ignore_eos is 3; allowed are True and False"),
        ({"stop": 5}, "stop is 5; allowed are sequences of non-empty strings"),
        ({"stop_ids": 5}, "stop_ids is 5; allowed are sequences of token ids"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"verify": ["block"]}, r"verify is \['block'\]; allowed are standard, block"),
        ({"verify": "synthetic"}, "verify is 'synthetic'; allowed are standard, block"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)


def test_a_number_that_python_will_not_print_is_refused_by_name():
    with pytest.raises(ValueError, match=r"temperature is an enormous int; allowed is a number in \[0, 100\]"):
        SamplingParams(temperature=10**5000)


def test_what_only_an_engine_can_refuse():
    with pytest.raises(ValueError, match="logit_bias has token id 61; allowed are integers from 0 to 60"):
        engine().add([1], SamplingParams(logit_bias={61: 1.0}))
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        engine().add([1], SamplingParams(stop=("x",)))
    with pytest.raises(ValueError, match="verify is 'typical'"):
        engine(verify="typical")
