"""Training of an EAGLE-3 head: the dense passes are the paged ones, the loss is its formula, and a toy head learns."""

import dataclasses
import json
import re
import shutil
from itertools import islice

import pytest
import torch
from safetensors.torch import load_file
from worlds import place, tiny_head, tiny_model, tiny_step

from stepgraph.model.checkpoint import load_model
from stepgraph.model.checkpoint.eagle3 import load_eagle3
from stepgraph.model.drafters.train_eagle3 import main, writer_of
from stepgraph.model.drafters.training.corpus import Corpus
from stepgraph.model.drafters.training.dense import target_forward
from stepgraph.model.drafters.training.generate import sample, write_texts
from stepgraph.model.drafters.training.hidden_store import HiddenStore
from stepgraph.model.drafters.training.loss import Teacher, soft_cross_entropy, teacher_of
from stepgraph.model.drafters.training.prompts import ASKED_TOKENS, asked_by
from stepgraph.model.drafters.training.templates import template_prompts
from stepgraph.model.drafters.training.trainer import Trainer
from stepgraph.model.drafters.training.unroll import unroll
from stepgraph.model.quantize import is_int8

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


def arguments(out, **changes) -> list[str]:
    options = {
        "target": "random:tiny-llama", "out": out, "max-tokens": 3000, "rows": 16, "shard-texts": 24, "max-len": 60,
        "draft-vocab": 120, "batch-tokens": 512, "train-tokens": 20_000, "device": "cpu", "dtype": "float32", "lr": 3e-3,
    }  # fmt: skip
    return [part for name, value in (options | changes).items() for part in (f"--{name}", str(value))]


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


@pytest.mark.parametrize(("rows", "block_size"), [(2, 64), (2, 8), (4, 8)])
def test_texts_are_what_the_target_would_write(rows, block_size, monkeypatch):
    """Greedy texts, of prompts of unlike length and with rows and their blocks reused, then moved, equal plain decoding."""
    monkeypatch.setattr("stepgraph.model.drafters.training.generate.BLOCK_SIZE", block_size)
    model = tiny_model(0)
    prompts = [[3, 1, 4], [7], [9, 8, 7, 6, 5, 4], [2, 2], [40, 41, 42, 43]]
    texts = list(write_texts(model, prompts, rows=rows, max_len=20, eos=(), seed=0, temperatures=(0.0,)))
    assert sorted(text.tokens[: text.prompt_len] for text in texts) == sorted(prompts)
    for text in texts:
        step = tiny_step("none", model=model)
        place(step, 0, text.tokens[: text.prompt_len])
        while int(step.state.seq_len[0]) < 19:
            step.state.set_rows([0])
            with torch.no_grad():
                step(1, 0)
        assert step.state.tokens(0, 0, 20) == text.tokens


@pytest.mark.parametrize("length", [0, 20, 70])
def test_a_prompt_without_a_place_is_refused(length):
    """Beyond its blocks it would be written over itself."""
    with pytest.raises(ValueError, match=f"a prompt has {length} tokens; allowed are 1 to 19"):
        next(write_texts(tiny_model(0), [[3] * length], rows=2, max_len=20, eos=(), seed=0))


def test_templates_are_filled_and_varied():
    prompts = list(islice(template_prompts(0), 3000))
    assert len(set(prompts)) == 3000
    assert not any("{" in prompt for prompt in prompts)
    assert prompts[:50] == list(islice(template_prompts(0), 50))
    assert prompts[:50] != list(islice(template_prompts(1), 50))


def test_draws_follow_the_law():
    logits = torch.log(torch.tensor([0.1, 0.0, 0.6, 0.3]))
    uniform = torch.rand(20_000, 1, generator=torch.Generator().manual_seed(0))
    tokens = sample(logits.expand(20_000, -1), torch.ones(20_000), uniform)
    counts = torch.bincount(tokens, minlength=4) / 20_000
    assert counts[1] == 0
    torch.testing.assert_close(counts, torch.tensor([0.1, 0.0, 0.6, 0.3]), atol=0.02, rtol=0)
    assert sample(logits[None], torch.zeros(1), torch.zeros(1, 1)).tolist() == [2]


def test_each_row_has_a_temperature_and_a_draw_of_its_own():
    generator = torch.Generator().manual_seed(0)
    logits, uniform = torch.randn(100, 30, generator=generator), torch.rand(100, 1, generator=generator)
    temperature = torch.tensor([0.0, 0.7, 1.0, 3.0]).repeat(25)
    alone = [sample(*(part[row : row + 1] for part in (logits, temperature, uniform))) for row in range(100)]
    assert torch.equal(sample(logits, temperature, uniform), torch.cat(alone))


class Letters:
    """A tokenizer of the tiny models: id n is the character n + 48."""

    chat_template, eos_token_ids = "<u>", (3, 17)

    def encode(self, text, add_special_tokens=True):
        return [ord(character) % 48 for character in text]

    def decode(self, ids):
        return "".join(chr(48 + token) for token in ids)

    def apply_chat_template(self, messages):
        return self.chat_template + messages[0]["content"] + "</u>"


def test_prompts_of_the_target_are_what_it_writes_after_a_template_and_ends(monkeypatch):
    model, seen = tiny_model(0), []

    def watched(target, prompts, **options):
        for text in write_texts(target, prompts, **options):
            seen.append(text)
            yield text

    monkeypatch.setattr("stepgraph.model.drafters.training.prompts.write_texts", watched)
    tokenizer = Letters()
    prompts = list(asked_by(model, tokenizer, 20, rows=4, seed=0))
    ended = [text.tokens for text in seen if text.tokens[-1] in tokenizer.eos_token_ids and len(text.tokens) > 4]
    assert len(ended) < len(seen)  # some do not end, or are empty
    assert {tuple(tokens[:3]) for tokens in ended} == {tuple(tokenizer.encode("<u>"))}
    assert prompts == list(dict.fromkeys(tokenizer.decode(tokens[3:-1]) for tokens in ended))
    assert len(prompts) == 20
    assert list(asked_by(model, tokenizer, 20, rows=4, seed=0)) == prompts


def test_a_target_that_cannot_write_prompts_is_told_so():
    def refused(message, model=None, **changes):
        tokenizer = Letters()
        vars(tokenizer).update(changes)
        with pytest.raises(ValueError, match=message):
            next(asked_by(model or tiny_model(0), tokenizer, 1, rows=2, seed=0))

    with pytest.raises(ValueError, match="no chat template that starts a user's words"):
        next(asked_by(tiny_model(0), None, 1, rows=2, seed=0))
    for without in ({"chat_template": None}, {"chat_template": ""}, {"apply_chat_template": lambda messages: "<u>"}):
        refused("no chat template that starts a user's words", **without)
    refused("wrote 0 prompts in 41 tries; --self-prompts 0 is allowed", eos_token_ids=())
    longest = len("<u>") + ASKED_TOKENS
    short = tiny_model(0, max_position=longest - 1)
    refused(f"--self-prompts takes {longest} tokens for a prompt; allowed is --max-len {longest} or more", short)


def test_texts_are_written_over_prompts_of_the_target_once_it_has_written_them(tmp_path, monkeypatch):
    def loaded(*args, **options):
        return dataclasses.replace(load_model(*args, **options), tokenizer=Letters())

    monkeypatch.setattr("stepgraph.model.drafters.train_eagle3.load_model", loaded)
    options = {"max-tokens": 400, "train-tokens": 1, "self-prompts": 9, "max-len": 80}
    assert main(arguments(tmp_path, **options)) == 0
    file = tmp_path / "self-prompts.jsonl"
    prompts = [json.loads(line)["prompt"] for line in file.read_text().splitlines()]
    given = [text.tokens[: text.prompt_len] for text in Corpus(tmp_path / "data").texts]
    assert len(set(prompts)) == 9
    tokenizer = Letters()
    assert all(tokenizer.encode(tokenizer.apply_chat_template([{"content": prompt}]))[:40] in given for prompt in prompts)

    monkeypatch.setattr("stepgraph.model.drafters.train_eagle3.asked_by", None)  # not asked again
    assert main(arguments(tmp_path, **options | {"max-tokens": 800})) == 0
    before = file.read_text()
    shutil.rmtree(tmp_path / "data")
    (tmp_path / "state.pt").unlink()
    assert main(arguments(tmp_path, **options)) == 0
    assert file.read_text() == before
    assert [text.tokens[: text.prompt_len] for text in Corpus(tmp_path / "data").texts] == given


def test_a_temperature_of_zero_writes_the_likeliest_tokens(tmp_path):
    assert main([*arguments(tmp_path, **{"max-tokens": 300, "train-tokens": 1}), "--temperatures", "0"]) == 0
    target, corpus = load_model("random:tiny-llama").model, Corpus(tmp_path / "data")
    for text in corpus.texts:
        with torch.no_grad():
            hidden, _ = target_forward(target, torch.tensor([text.tokens]))
        assert target.logits(hidden[0, text.prompt_len - 1 : -1]).argmax(-1).tolist() == text.tokens[text.prompt_len :]


def test_texts_may_be_written_with_int8_weights_and_the_target_stays_as_it_is(tmp_path, monkeypatch):
    target, writers = load_model("random:tiny-llama").model, []
    before = {name: weight.clone() for name, weight in target.named_parameters()}
    assert writer_of(target, None) is target
    assert is_int8(writer_of(target, "int8"))
    assert not is_int8(target)
    assert all(torch.equal(weight, before[name]) for name, weight in target.named_parameters())

    def watched(target, *args, **options):
        writers.append(target)
        return write_texts(target, *args, **options)

    monkeypatch.setattr("stepgraph.model.drafters.train_eagle3.write_texts", watched)
    assert main(arguments(tmp_path, **{"max-tokens": 300, "train-tokens": 1, "text-weights": "int8"})) == 0
    assert writers
    assert all(is_int8(writer) for writer in writers)
