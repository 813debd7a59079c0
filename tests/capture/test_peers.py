"""The comparison with other programs: the same weights on both sides, and what its table says."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from oracles import to_transformers
from worlds import tiny_model

from stepgraph.capture.experiments import llama_cpp, peers
from stepgraph.capture.experiments.peer_providers import THEIR_OPTIONS, hugging_face, their_generate
from stepgraph.capture.experiments.peers import table


def test_the_others_get_our_weights():
    model = tiny_model(dtype=torch.float32)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        assert torch.equal(hugging_face(model)(ids).logits, to_transformers(model)(ids).logits)


def test_their_speculative_ways_give_their_greedy_text():
    theirs = hugging_face(tiny_model(dtype=torch.float32))
    early = THEIR_OPTIONS["transformers-assisted"] | {"assistant_early_exit": 1}
    ways = [*list(THEIR_OPTIONS.values())[:2], early]
    texts = [their_generate(theirs, **options)([[3, 1, 4, 1, 5, 3, 1]], 12) for options in ways]
    assert len(texts[0][0]) == 12
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("amx", [False, True])
def test_llama_cpp_starts_every_prompt_anew_and_does_not_repack_where_that_crashes(amx, monkeypatch):
    seen = []

    class Llama:
        def __init__(self, path, **options):
            seen.append((path, options["n_ctx"], package.llama_cpp.llama_model_default_params().use_extra_bufts))

        def reset(self):
            seen.append("reset")

        def generate(self, ids, temp):
            assert temp == 0.0
            yield from range(len(ids), 100)

    def defaults():
        return SimpleNamespace(use_extra_bufts=True)

    package = SimpleNamespace(
        Llama=Llama, llama_model_default_params=defaults, llama_cpp=SimpleNamespace(llama_model_default_params=defaults)
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(llama_cpp, "embedded_path", lambda name: Path(name))
    generate = llama_cpp.llama_cpp_generate("m", 64)
    assert package.llama_cpp.llama_model_default_params is defaults
    assert [generate([[1, 2, 3]], 2), generate([[1]], 3)] == [[[3, 4]], [[1, 2, 3]]]
    assert seen == [("m", 64, not amx), "reset", "reset"]


def test_prompts_answered_at_once_have_the_answers_of_each_alone():
    generate = their_generate(hugging_face(tiny_model(dtype=torch.float32)))
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [3]]
    assert generate(prompts, 6) == [generate([ids], 6)[0] for ids in prompts]


def test_rows_of_providers_that_take_turns(monkeypatch):
    """Texts are held against the plain ones of the same family and weights, and rates against transformers in float32."""
    asked = []

    def answering(name, token):
        def generate(prompts, new):
            asked.append(name)
            return [[token] * new for _ in prompts]

        return generate

    def providers(weights, batch, max_len):
        assert (batch, max_len) == (2, 3 + 5 + 1)
        if weights == "Q4_1":
            yield "llama.cpp", 0, "not installed"
            return
        if weights != "int8":
            yield "transformers", 0, answering("transformers", 1)
        yield "ours", 0, answering("ours", 1 if weights == "float32" else 2)
        yield "ours-ngram", 3, answering("ours-ngram", 2)

    monkeypatch.setattr(peers, "providers", providers)
    rows = list(peers.peer_rows([[[1], [2]], [[3], [1, 2, 3]]], 5, peers.WEIGHTS))
    same = {(row["provider"], row["dtype"]): row["same_text"] for row in rows if row["status"] == "ok"}
    assert same == {
        ("transformers", "float32"): 4, ("ours", "float32"): 4, ("ours-ngram", "float32"): 0,
        ("transformers", "bfloat16"): 4, ("ours", "bfloat16"): 0, ("ours-ngram", "bfloat16"): 4,
        ("ours", "int8"): 0, ("ours-ngram", "int8"): 4,
    }  # fmt: skip
    assert rows[0]["speedup_p50"] == 1
    assert [row["provider"] for row in rows if row["status"] == "absent: not installed"] == ["llama.cpp"]
    first, second = asked[8:16], asked[16:]  # after one call each to set up
    assert second == first[1:] + first[:1]
    told = peers.headlines(rows)
    assert len(told) == 7
    assert told[0][0] == "greedy tokens/s over transformers in float32, batch 2: ours, float32"


def test_table_names_what_is_absent():
    good = {
        "provider": "ours", "status": "ok", "dtype": "float32", "batch": 1, "prompts": 2, "k": 0, "tokens_per_s_p50": 7.25,
        "speedup_p50": 1.5, "speedup_p25": 1.25, "speedup_p75": 1.75, "same_text": 2,
    }  # fmt: skip
    drawn = table([good, {"provider": "llama.cpp", "status": "absent: not installed", "dtype": "float32"}])
    assert drawn.lines == [["1", "float32", "ours", "0", "7.2", "1.50 (1.25 to 1.75)", "2 of 2"]]
    assert "llama.cpp is absent: not installed." in drawn.note
