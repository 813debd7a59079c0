"""Texts to train on: the target writes them as it would for a user, over prompts from templates and of its own."""

import dataclasses
import json
import shutil
from itertools import islice

import pytest
import torch
from training_arguments import arguments
from worlds import place, tiny_model, tiny_step

from stepgraph.model.checkpoint import load_model
from stepgraph.model.drafters.train_eagle3 import main, writer_of
from stepgraph.model.drafters.training.corpus import Corpus
from stepgraph.model.drafters.training.dense import target_forward
from stepgraph.model.drafters.training.generate import sample, write_texts
from stepgraph.model.drafters.training.prompts import ASKED_TOKENS, asked_by
from stepgraph.model.drafters.training.templates import template_prompts
from stepgraph.model.quantize import is_int8


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
