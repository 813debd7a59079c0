"""The EAGLE-3 drafter inside steps: what it is shown, what it keeps, and that neither depends on how the text came about."""

import json
import random
from itertools import islice

import pytest
import torch
from worlds import ScriptedDrafter, committed_kv, place, run, snapshot, text, tiny_head, tiny_model, tiny_step

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.capture.request import SamplingParams
from stepgraph.model.checkpoint import CheckpointError
from stepgraph.model.drafters import DrafterSpec
from stepgraph.model.drafters.train_eagle3 import main
from stepgraph.model.drafters.training.prompts import encode, prompt_stream

PROMPT = [3, 1, 4, 1, 5, 9, 2]


def world(model=None, **options):
    return tiny_step("eagle3:tiny", model=model or tiny_model(0, invariant=True), draft_seed=1, **options)


def proposal(step, slot: int, k: int):
    step.state.set_rows([slot])
    with torch.no_grad():
        return step.drafter.propose(step.state.rows(1, k, step.drafter.max_positions), k)


def target_streams(model, tokens: list[int], layers) -> torch.Tensor:
    """`[positions, hidden * len(layers)]`: inputs of the layers, from the layers' own outputs in one pass over the text."""
    step = tiny_step("none", model=model, num_slots=1)
    place(step, 0, [*tokens, 0])
    streams = {}

    def keep(index):
        def hook(_, inputs):
            x, residual = inputs[0], inputs[1]
            streams[index] = (x if residual is None else x + residual)[0]

        return hook

    handles = [layer.register_forward_pre_hook(keep(i)) for i, layer in enumerate(model.layers)]
    last = model.layers[-1].register_forward_hook(lambda _, __, out: streams.update({len(model.layers): (out[0] + out[1])[0]}))
    with torch.no_grad():
        step.prefill(0, tokens, 0)
    for handle in (*handles, last):
        handle.remove()
    return torch.cat([streams[index] for index in layers], -1)


class Spy:
    """What the head was given for each position of a slot: features and the next token."""

    def __init__(self, step):
        self.step, self.features, self.tokens = step, {}, {}
        drafter = step.drafter
        observe, prefill = drafter.observe, drafter.prefill

        def spied_observe(rows, k, verified):
            observe(rows, k, verified)
            start, accepted = int(rows.seq_len[0]), int(verified.accepted[0])
            for i in range(accepted + 1):
                self.features[start + i] = verified.features[0, i]
                self.tokens[start + i] = int(verified.emitted[0, i])

        def spied_prefill(chunk):
            prefill(chunk)
            for i, position in enumerate(chunk.rows.positions[0].tolist()):
                self.features[position] = chunk.features[0, i]
                self.tokens[position] = int(chunk.next_tokens[0, i])

        drafter.observe, drafter.prefill = spied_observe, spied_prefill


def forced(step, right: list[int], wrong_at: set[int]) -> Spy:
    """Make the drafter propose the target's own greedy text, but for some positions."""
    scripted = ScriptedDrafter(4, 64)
    script = [(token + 1) % 61 if position in wrong_at else token for position, token in enumerate(right)]
    scripted.script[:, : len(right)] = torch.tensor(script)
    step.drafter.propose = scripted.propose
    return Spy(step)


def greedy_text(model, prompt: list[int], length: int) -> list[int]:
    plain = tiny_step("none", model=model)
    place(plain, 0, prompt)
    while int(plain.state.seq_len[0]) < length:
        run(plain, [0], 0)
    return text(plain, 0)


def check_inputs(step, spy: Spy, slot: int) -> None:
    tokens = text(step, slot)
    assert sorted(spy.features) == list(range(len(tokens) - 1))
    shown = torch.stack([spy.features[position] for position in range(len(tokens) - 1)])
    expected = target_streams(step.target, tokens[:-1], step.feature_layers)
    torch.testing.assert_close(shown, expected, rtol=0, atol=1e-12)
    assert [spy.tokens[position] for position in range(len(tokens) - 1)] == tokens[1:]


@pytest.mark.parametrize("accepted", range(4))
def test_features_after_each_accept_pattern(accepted):
    step = world(tiny_model(0, invariant=True, num_layers=4))
    right = greedy_text(step.target, PROMPT, len(PROMPT) + 5)
    spy = forced(step, right, {len(PROMPT) + accepted})
    place(step, 0, PROMPT)
    run(step, [0], 3)
    assert int(step.state.accepted_at[0].sum()) == accepted
    assert text(step, 0) == right[: len(PROMPT) + accepted + 1]
    check_inputs(step, spy, 0)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_head_is_shown_the_targets_hidden_states_position_by_position(family):
    """A walk of k with right and wrong drafts mixed; the layers are the embeddings, one within, and what leaves the last."""
    rng = random.Random(family)
    step = world(tiny_model(0, family, invariant=True, num_layers=5))
    layers = (0, 3, 5)
    step.drafter.feature_layers = step.feature_layers = layers
    spy = forced(step, greedy_text(step.target, PROMPT, 55), set(rng.sample(range(55), 20)))
    place(step, 1, PROMPT, limit=50)
    while not int(step.state.finished[1]):
        run(step, [1], rng.randrange(6))
    assert 5 < int(step.state.accepted_at[1].sum()) < int(step.state.drafted_at[1].sum()) - 5
    check_inputs(step, spy, 1)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_state_and_next_proposal_equal_a_prefill_of_the_text_after_every_step(temperature):
    """Cases 26, 27, 29: a walk of k, and after each step a drafter that never drafted agrees in every respect."""
    rng = random.Random(7)
    model = tiny_model(0, invariant=True)
    step = world(model)
    place(step, 2, PROMPT, temperature=temperature, seed=3)
    for _ in range(18):
        k = rng.randrange(6)
        run(step, [2], k)
        if int(step.state.finished[2]):
            break
        fresh = world(model)
        place(fresh, 2, text(step, 2), temperature=temperature, seed=3)
        torch.testing.assert_close(
            committed_kv(step, 2, step.drafter.kv), committed_kv(fresh, 2, fresh.drafter.kv), rtol=0, atol=1e-12
        )
        torch.testing.assert_close(step.drafter.feature[2], fresh.drafter.feature[2], rtol=0, atol=1e-12)
        ours, theirs = proposal(step, 2, 4), proposal(fresh, 2, 4)
        assert torch.equal(ours.tokens, theirs.tokens)
        torch.testing.assert_close(ours.law, theirs.law, rtol=0, atol=1e-12)


def test_k_that_rests_at_zero_leaves_the_drafter_as_if_it_never_rested():
    """Case 26, bit for bit."""
    model = tiny_model(0, invariant=True)
    resting, steady = world(model), world(model)
    for step in (resting, steady):
        place(step, 0, PROMPT)
    for k in (3, 3, 0, 0, 0):
        run(resting, [0], k)
    while int(steady.state.seq_len[0]) < int(resting.state.seq_len[0]):
        run(steady, [0], 3 if int(steady.state.seq_len[0]) + 4 <= int(resting.state.seq_len[0]) else 0)
    assert text(resting, 0) == text(steady, 0)
    assert torch.equal(resting.drafter.feature, steady.drafter.feature)
    kv = [committed_kv(step, 0, step.drafter.kv) for step in (resting, steady)]
    assert torch.equal(*kv)
    assert torch.equal(proposal(resting, 0, 3).law, proposal(steady, 0, 3).law)


@pytest.mark.parametrize("cuts", [[6], [1, 1, 1, 1, 1, 1], [4, 2], [1, 5], [5, 1]])
def test_where_a_prompt_is_cut_does_not_matter(cuts):
    """The head looks one token ahead, across the end of a chunk and into the token that is not prefilled."""
    whole, chunked = world(), world()
    place(whole, 0, PROMPT)
    place(chunked, 0, PROMPT)
    chunked.drafter.kv.storage.zero_()
    chunked.drafter.feature.zero_()
    start = 0
    for length in cuts:
        with torch.no_grad():
            chunked.prefill(0, PROMPT[start : start + length], start)
        start += length
    assert start == len(PROMPT) - 1
    kv = [committed_kv(step, 0, step.drafter.kv) for step in (whole, chunked)]
    torch.testing.assert_close(*kv, rtol=0, atol=1e-12)
    torch.testing.assert_close(whole.drafter.feature, chunked.drafter.feature, rtol=0, atol=1e-12)
    assert torch.equal(proposal(whole, 0, 3).tokens, proposal(chunked, 0, 3).tokens)


def test_a_text_of_one_token_drafts_nothing_at_first():
    step = world()
    step.drafter.feature.fill_(torch.nan)  # of an earlier request in the slot
    place(step, 1, [5])
    assert proposal(step, 1, 3).tokens[0, 0] == -1
    run(step, [1], 3)
    assert step.state.drafted_at[1].tolist() == [0] * 5
    assert len(text(step, 1)) == 2
    run(step, [1], 3)
    assert step.state.drafted_at[1].tolist() == [1, 1, 1, 0, 0]
    fresh = world()
    place(fresh, 1, text(step, 1))
    assert torch.equal(proposal(step, 1, 3).tokens, proposal(fresh, 1, 3).tokens)


def test_drafts_come_from_the_draft_vocabulary_with_their_law():
    step = world()
    place(step, 0, PROMPT, temperature=1.3, seed=2)
    ids = step.drafter.head.target_ids
    for seed in range(20):
        step.state.seed[0] = seed
        drafted = proposal(step, 0, 5)
        assert drafted.law.shape == (1, 5, len(ids))
        assert torch.equal(drafted.d2t, ids)
        assert torch.isin(drafted.tokens, ids).all()
        torch.testing.assert_close(drafted.law.sum(-1), torch.ones(1, 5, dtype=torch.float64))
        at = (ids == drafted.tokens[..., None]).to(torch.int64).argmax(-1)
        assert (drafted.law.gather(-1, at[..., None]) > 0).all()


def test_a_head_of_the_whole_vocabulary_needs_no_map():
    model = tiny_model(0)
    step = tiny_step("eagle3:tiny", model=model)
    whole = tiny_head(model, draft_vocab=61)
    step.drafter.head = whole
    place(step, 0, PROMPT)
    drafted = proposal(step, 0, 2)
    assert drafted.d2t is None
    assert drafted.law.shape == (1, 2, 61)
    run(step, [0], 2)


def test_padding_rows_leave_the_null_slot_alone():
    step = world()
    place(step, 0, PROMPT)
    step.drafter.feature[-1] = 7.0
    before = snapshot(step)
    run(step, [-1, 0, -1, -1], 2)
    after = snapshot(step)
    assert torch.equal(before["drafter.feature"][1:], after["drafter.feature"][1:])
    assert not torch.equal(before["drafter.feature"][0], after["drafter.feature"][0])
    assert torch.equal(before["drafter.kv.storage"][:, :, 0], after["drafter.kv.storage"][:, :, 0])


def test_nothing_is_drafted_or_written_beyond_the_heads_own_positions():
    """Case 33: the head was made for 16 positions, the target for more."""
    model = tiny_model(0)
    step = tiny_step("eagle3:tiny", model=model)
    step.drafter.head = tiny_head(model, 1, max_positions=16)
    step.drafter.max_positions = 16
    place(step, 0, [*PROMPT, *PROMPT], limit=30)  # 14 tokens
    drafted = []
    while not int(step.state.finished[0]):
        before = int(step.state.drafted_at[0].sum())
        start = int(step.state.seq_len[0])
        run(step, [0], 3)
        drafted.append((start, int(step.state.drafted_at[0].sum()) - before))
    assert all(count <= max(0, 16 - start) for start, count in drafted)
    assert drafted[-1][1] == 0
    flat = step.drafter.kv.storage[:, :, step.state.block_table[0]].flatten(2, 3)
    assert flat[:, :, :16].abs().sum() > 0
    assert not flat[:, :, 16:].any()
    plain = tiny_step("none", model=model)
    place(plain, 0, [*PROMPT, *PROMPT], limit=30)
    while not int(plain.state.finished[0]):
        run(plain, [0], 0)
    assert text(step, 0) == text(plain, 0)


def test_engine_with_a_random_head_says_what_plain_decoding_says():
    outputs = []
    for drafter, k in (("eagle3:random", 3), ("none", 0)):
        options = EngineOptions("random:tiny-qwen3", drafter, k=k, max_batch=3, max_len=64, dtype="float64", prefill_chunk=4)
        engine = build_engine(options).engine
        prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7], [200, 100]]
        outputs.append([output.token_ids for output in engine.generate(prompts, SamplingParams(max_new_tokens=20))])
        assert engine.graphs.misses == 0
    assert outputs[0] == outputs[1]


def test_names():
    assert DrafterSpec.parse("eagle3").head == ""
    assert DrafterSpec.parse("eagle3:some/where").head == "some/where"
    with pytest.raises(ValueError, match="eagle3:DIRECTORY"):
        DrafterSpec.parse("eagle3:")
    with pytest.raises(CheckpointError, match=r"no EAGLE-3 head for 'random:tiny-llama'.*give eagle3:DIRECTORY"):
        build_engine(EngineOptions("random:tiny-llama", "eagle3"))
    with pytest.raises(CheckpointError, match="hybrid:MIN:early-exit:N"):
        build_engine(EngineOptions("random:tiny-llama", "hybrid"))
    with pytest.raises(CheckpointError, match="nowhere is no directory"):
        build_engine(EngineOptions("random:tiny-llama", "eagle3:nowhere"))


def test_a_trained_head_is_accepted_as_often_as_its_card_says(tmp_path):
    """From data to engine: if training and drafting disagreed about a row, acceptance would stay near 1 in 256."""
    out = tmp_path / "run"
    options = {
        "target": "random:tiny-llama", "out": out, "max-tokens": 4000, "rows": 32, "shard-texts": 48, "max-len": 60,
        "draft-vocab": 120, "batch-tokens": 512, "train-tokens": 60_000, "device": "cpu", "dtype": "float32", "lr": 3e-3,
    }  # fmt: skip
    assert main([part for name, value in options.items() for part in (f"--{name}", str(value))]) == 0
    accuracy = json.loads((out / "head" / "card.json").read_text())["held_out"]["accuracy"]
    engine = build_engine(EngineOptions("random:tiny-llama", f"eagle3:{out / 'head'}", k=3, max_batch=4, max_len=64)).engine
    prompts = [encode(text, None, 256, 30) for text in islice(prompt_stream([], 99), 12)]
    engine.generate(prompts, SamplingParams(max_new_tokens=28))
    report = engine.report()
    assert accuracy[0] > 0.2
    assert all(rate > 0.15 for rate in report["per_position_acceptance"])
    assert report["acceptance_length"] > 1.3
