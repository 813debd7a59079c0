"""Greedy speculative text of the embedded model equals plain greedy text with int8 weights too."""

from pathlib import Path

import pytest
import torch

from stepgraph.capture.build import EngineOptions, build_engine, load_target
from stepgraph.capture.prompts import encode_prompt, read_prompts
from stepgraph.capture.request import SamplingParams
from stepgraph.kernels.packed import pack
from stepgraph.model.checkpoint import load_model
from stepgraph.model.quantize import is_int8

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl"

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]

needs_products = pytest.mark.skipif(not pack(torch.ones(1, 1, dtype=torch.int8)), reason="no compiled products here: hours")


@pytest.fixture(scope="module")
def loaded():
    return load_target(EngineOptions(dtype="bfloat16", weights="int8", device="cpu"))


def texts(loaded, drafter: str, k: int, batch: int = 1) -> list[tuple[int, ...]]:
    ids = [encode_prompt(each.prompt, loaded.tokenizer) for each in read_prompts(PROMPTS) if each.id in ("code-4", "maths-1")]
    engine = build_engine(EngineOptions(drafter=drafter, k=k, max_batch=batch, max_len=256), loaded).engine
    outputs = engine.generate(ids, SamplingParams(max_new_tokens=20, ignore_eos=True))
    return [tuple(output.token_ids) for output in outputs]


@needs_products
def test_greedy_text_is_plain_greedy_text(loaded):
    """No option asks for it: sums of integers have no order. Attention and norms are of a row alone anyway."""
    plain = texts(loaded, "none", 0)
    for drafter, k, batch in (("hybrid", 1, 1), ("hybrid", 3, 2), ("eagle3", 7, 1), ("ngram", 7, 2)):
        assert texts(loaded, drafter, k, batch) == plain, (drafter, k, batch)


def test_the_head_is_rounded_as_its_target_is(loaded):
    step = build_engine(EngineOptions(drafter="eagle3", k=1, max_batch=1, max_len=64), loaded).engine.graphs.step
    assert is_int8(step.target)
    assert is_int8(step.drafter.head)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_is_never_a_silent_default(dtype):
    assert EngineOptions(dtype=dtype).weights is None
    assert not is_int8(load_target(EngineOptions(dtype=dtype, device="cpu")).model)
    assert not is_int8(load_model("smollm2-135m").model)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights": "int4"}, "weights is 'int4'; allowed are int8, and None for weights of the dtype"),
        (
            {"weights": "int8", "dtype": "float16"},
            "weights is 'int8' with dtype 'float16'; int8 weights go with float32 and bfloat16",
        ),
    ],
)
def test_what_there_is_not_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        EngineOptions(**given)
