"""Greedy speculative text of the embedded model equals transformers' plain greedy text with the same weights, in float32."""

import json
from pathlib import Path

import pytest
import torch
from oracles import to_transformers

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.prompts import encode_prompt, read_prompts
from stepgraph.capture.request import SamplingParams

PROMPTS = Path(__file__).parents[2] / "benchmarks" / "prompts.jsonl"
# prompts and new tokens: at full length, and as far as every run of the tests goes
WHOLE, SHORT = (["code-1", "code-3", "summarise-2", "maths-3", "chat-2", "chat-3"], 48), (["code-3", "maths-3", "chat-3"], 32)

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def size(request) -> tuple[list[str], int]:
    return WHOLE if request.config.getoption("--whole") else SHORT


@pytest.fixture(scope="module")
def prompts(embedded, size) -> list[list[int]]:
    texts = [record.prompt for record in read_prompts(PROMPTS) if record.id in size[0]]
    assert len(texts) == len(size[0])
    return [encode_prompt(text, embedded.tokenizer) for text in texts]


@pytest.fixture(scope="module")
def expected(embedded, prompts, size) -> list[list[int]]:
    theirs = to_transformers(embedded.model)
    answers = []
    for ids in prompts:
        output = theirs.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=size[1], do_sample=False,
            pad_token_id=0,
        )  # fmt: skip
        answers.append(output[0, len(ids) :].tolist())
    return answers


DRAFTERS = ["ngram", "early-exit:20", "draft-model:smollm2-135m"]


# At k = 0 the other drafters' graphs are this one's (tests/capture/test_modes.py).
@pytest.mark.parametrize(
    ("drafter", "k"),
    [("draft-model:smollm2-135m", 0), *((d, k) for d in DRAFTERS for k in (1, 3, 5)), ("eagle3", 3), ("hybrid", 5)],
)
def test_greedy_text_equals_transformers(embedded, prompts, expected, size, drafter, k):
    batch = len(prompts)
    engine = build_engine(EngineOptions(drafter=drafter, k=k, max_batch=batch, max_len=512), embedded).engine
    # One bucket serves all batches here: tracing thirty layers once a bucket would take longer than the text.
    engine.graphs = StepGraphs(engine.graphs.step, KeySet([GraphKey(batch, k)]), strict=True)
    outputs = engine.generate(prompts, SamplingParams(max_new_tokens=size[1]))
    assert [output.token_ids for output in outputs] == expected
    report = engine.report()
    assert report["graph_misses"] == 0
    if k and drafter.startswith("draft-model"):
        # The draft model is the target itself: a hole in its cache would show as a rejection. Row counts differ between
        # the two, so float32 rounding may still part them at a near tie.
        assert min(report["per_position_acceptance"]) > 0.95
    if drafter in ("eagle3", "hybrid"):
        # The shipped head: look-up alone takes 1.3 tokens a step of these prompts.
        assert report["acceptance_length"] > 1.5


def test_json_document_holds_what_was_generated(embedded, tmp_path, capsys):
    from stepgraph.capture.cli import main

    target = tmp_path / "out.json"
    status = main(["generate", "Name a fruit.", "--max-new-tokens", "6", "--max-batch", "1", "--json", str(target)])
    document = json.loads(target.read_text())
    assert status == 0
    assert set(document) == {"model", "drafter", "verify", "mode", "device", "dtype", "weights", "requests", "stats"}
    (request,) = document["requests"]
    assert request["prompt"] == "Name a fruit."
    assert request["text"] == embedded.tokenizer.decode(request["token_ids"])
    assert request["text"] in capsys.readouterr().out
