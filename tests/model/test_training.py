"""Training of an EAGLE-3 head: the dense passes are the paged ones, the loss is its formula, and a toy head learns."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from training_arguments import arguments
from worlds import place, tiny_head, tiny_model, tiny_step

from stepgraph.model.checkpoint import load_model
from stepgraph.model.checkpoint.eagle3 import load_eagle3
from stepgraph.model.drafters.train_eagle3 import main
from stepgraph.model.drafters.training.corpus import Corpus
from stepgraph.model.drafters.training.dense import target_forward
from stepgraph.model.drafters.training.hidden_store import HiddenStore
from stepgraph.model.drafters.training.loss import Teacher, soft_cross_entropy, teacher_of
from stepgraph.model.drafters.training.trainer import Trainer
from stepgraph.model.drafters.training.unroll import unroll

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def paged(model, tokens, layers):
    """Final hidden states and features `[T, ..]` of one text, from the product's own forward pass."""
    step, seen = tiny_step("none", model=model), []
    run = model.hidden_and_features
    step.target.hidden_and_features = lambda *args: (seen.append(run(*args[:3], layers)), seen[-1])[1]
    place(step, 0, [*tokens, 0])
    del step.target.hidden_and_features
    return [part[0] for part in seen[0]]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_dense_forward_equals_the_paged_one(family):
    model = tiny_model(0, family, num_layers=3, **({"layer_windows": (0, 4, 0)} if family == "qwen3" else {}))
    expected = paged(model, TOKENS, (0, 2, 3))
    tokens = torch.tensor([TOKENS, TOKENS[::-1]])
    with torch.no_grad():
        found = target_forward(model, tokens, (0, 2, 3))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours[0], theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"family": "qwen3", "qk_norm": True}, {"norm_first": True}])
def test_unrolled_passes_are_what_the_drafter_computes(options):
    """Row i of pass s: a drafter whose text ends at i + 1, s single rows later."""
    model, norm_first = tiny_model(0, num_layers=4), options.pop("norm_first", False)
    head = tiny_head(model, 1, **options)
    head.layer.norm_before_residual = norm_first
    features = paged(model, TOKENS, head.eagle.feature_layers)[1][None]
    with torch.no_grad():
        outputs = unroll(head, features, torch.tensor([TOKENS]), model.embed, 3)
    for length in (2, 5, 7):  # tokens of the text; the last of them is not in the cache
        step = tiny_step("eagle3:tiny", model=model)
        step.drafter.head = head
        place(step, 0, TOKENS[:length])
        forced, laws = iter(TOKENS[length:]), []
        step.state.set_rows([0])
        with torch.no_grad():
            rows = step.state.rows(1, 3, None)
            feature = step.drafter.feature[rows.slots]
            laws.append(head.logits(feature)[0])
            for column in (1, 2):
                position = rows.seq_len + column - 1
                query = rows.query(position, 1, step.kv.block_size, live=rows.live, writable=position + 1)
                token = torch.tensor([[next(forced)]])
                feature = head(token, feature[:, None], query, step.drafter.kv, model.embed)[:, 0]
                laws.append(head.logits(feature)[0])
        for number, law in enumerate(laws):
            ours = outputs[number][0, length - 2] @ head.lm_head.T
            torch.testing.assert_close(ours, law, rtol=0, atol=1e-10)


@pytest.mark.parametrize("frozen", [True, False])
def test_loss_and_gradients_equal_autograd(frozen, monkeypatch):
    monkeypatch.setattr("stepgraph.model.drafters.training.loss.CHUNK", 7)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(30, 8, generator=generator, dtype=torch.float64, requires_grad=not frozen)
    teacher = teacher_of(torch.randn(20, 8, generator=generator, dtype=torch.float64), torch.randn(30, 8).double(), top=5)
    assert teacher.ids.shape == (20, 5)
    assert (teacher.probs.diff(dim=-1) <= 0).all()
    loss, hits = soft_cross_entropy(x, weight, teacher)
    logits = x @ weight.T
    expected = -(teacher.probs * logits.log_softmax(-1).gather(-1, teacher.ids)).sum()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert int(hits) == int((logits.argmax(-1) == teacher.ids[:, 0]).sum())
    inputs = [x] if frozen else [x, weight]
    for ours, theirs in zip(
        torch.autograd.grad(2 * loss, inputs), torch.autograd.grad(2 * expected, inputs, retain_graph=True), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_teacher_of_fewer_tokens_than_the_top():
    teacher = teacher_of(torch.randn(3, 4), torch.randn(6, 4))
    assert isinstance(teacher, Teacher)
    torch.testing.assert_close(teacher.probs.sum(-1), torch.ones(3))


def test_training_reduces_the_loss_on_a_toy_target(tmp_path):
    """The whole command: data, training, head in the public layout, card; and the head drafts."""
    target = load_model("random:tiny-llama").model
    out = tmp_path / "run"
    assert main(arguments(out)) == 0
    card = json.loads((out / "head" / "card.json").read_text())
    untrained = tmp_path / "untrained"
    (untrained / "data").parent.mkdir()
    shutil.copytree(out / "data", untrained / "data")
    assert main(arguments(untrained, **{"train-tokens": 1})) == 0
    before = json.loads((untrained / "head" / "card.json").read_text())["held_out"]
    after = card["held_out"]
    assert all(new < old - 0.05 for new, old in zip(after["loss"], before["loss"], strict=True))
    assert after["accuracy"][0] > before["accuracy"][0]
    assert card["data"]["tokens"] >= 3000
    assert card["training"]["tokens"] >= 20_000
    assert "--max-tokens 3000" in card["command"]
    head = load_eagle3(out / "head", target)
    assert head.eagle.draft_vocab_size == 120
    assert torch.equal(head.lm_head, target.embed[head.target_ids].bfloat16().float())

    further = tmp_path / "further"
    shutil.copytree(out / "data", further / "data")
    assert main(arguments(further, **{"start-from": out / "head", "train-tokens": 1})) == 0
    started = json.loads((further / "head" / "card.json").read_text())["held_out"]
    assert started["loss"] == pytest.approx(after["loss"], abs=0.02)
    assert torch.equal(load_eagle3(further / "head", target).target_ids, head.target_ids)


def test_a_head_goes_on_with_more_tokens_to_propose_and_output_rows_of_its_own(tmp_path, capsys):
    """What it could propose keeps its rows, wherever they move to; the others start as the target's."""
    target = load_model("random:tiny-llama").model
    first, wider, frozen = (tmp_path / name for name in ("first", "wider", "frozen"))
    small = {"max-tokens": 1500, "train-tokens": 3000}
    assert main([*arguments(first, **small), "--no-frozen-head"]) == 0
    before = load_eagle3(first / "head", target)
    assert not torch.equal(before.lm_head, target.embed[before.target_ids].bfloat16().float())
    for out in (wider, frozen):
        shutil.copytree(first / "data", out / "data")
    once = small | {"start-from": first / "head", "train-tokens": 1, "draft-vocab": 200, "lr": 1e-9}
    assert main(arguments(wider, **once)) == 0
    after = load_eagle3(wider / "head", target)
    assert after.eagle.draft_vocab_size == 200
    own = torch.isin(after.target_ids, before.target_ids)
    assert torch.equal(after.target_ids[own], before.target_ids)
    assert torch.equal(after.lm_head[own], before.lm_head)
    assert torch.equal(after.lm_head[~own], target.embed[after.target_ids[~own]].bfloat16().float())
    capsys.readouterr()
    # Frozen rows are those that it has, so training from a head whose rows are not the target's measures what it saves.
    assert main(arguments(frozen, **once | {"draft-vocab": 120})) == 0
    again = json.loads((frozen / "head" / "card.json").read_text())["held_out"]
    assert again["loss"] == pytest.approx(json.loads((first / "head" / "card.json").read_text())["held_out"]["loss"], abs=0.02)
    assert main(arguments(tmp_path / "less", **once | {"draft-vocab": 100})) == 2
    assert "--draft-vocab is 100; allowed with --start-from is 120" in capsys.readouterr().err


def test_an_interrupted_run_goes_on_and_ends_as_an_uninterrupted_one(tmp_path, monkeypatch):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    small = {"max-tokens": 1500, "train-tokens": 6000}
    assert main(arguments(whole, **small)) == 0

    # Interrupted while the second shard is written, then after a few steps of training.
    monkeypatch.setattr(Corpus, "add", interrupting(Corpus.add, 2))
    assert main(arguments(broken, **small)) == 130
    monkeypatch.undo()
    assert len(list((broken / "data").iterdir())) == 1
    monkeypatch.setattr(Trainer, "_step", interrupting(Trainer._step, 4))
    assert main(arguments(broken, **small)) == 130
    monkeypatch.undo()
    assert main(arguments(broken, **small)) == 0
    first, second = (load_file(out / "head" / "model.safetensors") for out in (whole, broken))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_stored_hidden_states_are_those_that_would_be_recomputed(tmp_path):
    small = {"max-tokens": 1500, "train-tokens": 6000}
    heads = []
    for name in ("--store-hidden", "--no-store-hidden"):
        out = tmp_path / name
        assert main([*arguments(out, **small), name]) == 0
        assert (out / "hidden.bin").exists() == (name == "--store-hidden")
        heads.append(load_file(out / "head" / "model.safetensors"))
    target = load_model("random:tiny-llama").model
    corpus = Corpus(tmp_path / "--store-hidden" / "data")
    store = HiddenStore(tmp_path / "--store-hidden" / "hidden.bin", corpus, 4 * 64)
    batch = corpus.batch([3, 1])
    layers = load_eagle3(tmp_path / "--store-hidden" / "head", target).eagle.feature_layers
    with torch.no_grad():
        states = torch.cat(target_forward(target, batch.tokens, layers), -1)
    kept = store.get(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        torch.testing.assert_close(kept[row, :length].float(), states[row, :length], rtol=2**-8, atol=1e-6)
        assert not kept[row, length:].any()
    # Rounding moves the trained weights little.
    assert all((heads[0][name].float() - heads[1][name].float()).abs().mean() < 0.02 for name in heads[0])
    assert HiddenStore(tmp_path / "--store-hidden" / "hidden.bin", corpus, 8).get(batch) is None


def interrupting(method, call: int):
    """The method, with Ctrl-C at its `call`-th call."""
    calls = iter(range(1, 10**9))

    def wrapped(self, *args):
        if next(calls) == call:
            raise KeyboardInterrupt
        return method(self, *args)

    return wrapped


def test_what_cannot_be_trained_is_said_in_a_sentence(tmp_path, capsys):
    assert main(arguments(tmp_path, target="random:nothing")) == 2
    assert "no preset is called 'nothing'" in capsys.readouterr().err
    assert main(arguments(tmp_path, **{"max-tokens": 0})) == 2
    assert "has no texts" in capsys.readouterr().err
    assert main(arguments(tmp_path / "new", **{"start-from": tmp_path / "nowhere"})) == 2
    assert "nowhere is no directory" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    (tmp_path / "p.jsonl").write_text('{"question": 1}')
    assert main(arguments(tmp_path, prompts=tmp_path / "p.jsonl")) == 2
    assert "line 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"),
    [("self-prompts", -1), ("rows", 0), ("shard-texts", 0), ("max-len", 1), ("passes", 0)]
    + [("temperatures", value) for value in (-1, "nan", "inf")],
)
def test_a_number_that_an_option_cannot_be_is_named(tmp_path, capsys, option, value):
    assert main([*arguments(tmp_path / "new"), f"--{option}", str(value)]) == 2
    assert re.search(f"--{option} (is|has) {value}.*; allowed (is|are) ", capsys.readouterr().err)
    assert not (tmp_path / "new").exists()
