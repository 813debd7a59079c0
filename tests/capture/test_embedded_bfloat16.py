"""Greedy speculative text of the embedded model equals plain greedy text in bfloat16 too, where products are row-invariant."""

from pathlib import Path

import pytest
import torch

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.prompts import encode_prompt, read_prompts
from stepgraph.capture.request import SamplingParams
from stepgraph.model.checkpoint import load_model

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl"

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def loaded():
    return load_model("smollm2-135m", dtype=torch.bfloat16, invariant_linear=True)


def texts(loaded, drafter: str, k: int) -> list[tuple[int, ...]]:
    """Answers to two prompts, one after the other: at batch 1 every k has another number of rows.

    Prompts where products that are not row-invariant (AVX-512) give another text within these tokens.
    """
    ids = [encode_prompt(each.prompt, loaded.tokenizer) for each in read_prompts(PROMPTS) if each.id in ("code-4", "maths-1")]
    engine = build_engine(EngineOptions(drafter=drafter, k=k, max_batch=1, max_len=256), loaded).engine
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    return [tuple(engine.generate([prompt], params)[0].token_ids) for prompt in ids]


@pytest.fixture(scope="module")
def plain(loaded):
    return texts(loaded, "none", 0)


@pytest.mark.parametrize(("drafter", "k"), [("hybrid", 1), ("hybrid", 3), ("eagle3", 7), ("ngram", 7)])
def test_greedy_text_is_plain_greedy_text(loaded, plain, drafter, k):
    assert texts(loaded, drafter, k) == plain
