"""Greedy speculative text equals plain greedy text, and eager equals graph, for every drafter and every change of k."""

import random

import pytest
import torch
from oracles import to_transformers
from worlds import committed_kv, place, run, snapshot, text, tiny_model, tiny_step

from stepgraph.capture.trace import trace_step

DRAFTERS = ("ngram", "early-exit:1", "draft-model:tiny", "draft-model:other", "eagle3:tiny")
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [7, 7, 7, 7], [2], [40, 41, 40, 41, 40])


def world(drafter: str, family: str = "llama", invariant: bool = False):
    seed = 1 if drafter == "draft-model:other" else 0
    return tiny_step(drafter, model=tiny_model(0, family, invariant=invariant), draft_seed=seed)


def run_until_done(step, ks, slots):
    for k in ks:
        if bool((step.state.finished[slots] != 0).all()):
            return
        run(step, slots, k)
    raise AssertionError(f"not done after {len(ks)} steps")


@pytest.fixture(scope="module")
def plain_texts():
    texts = {}
    for family in ("llama", "qwen2", "qwen3"):
        step = world("none", family)
        for slot, prompt in enumerate(PROMPTS):
            place(step, slot, prompt, limit=28)
        run_until_done(step, [0] * 30, [0, 1, 2, 3])
        texts[family] = [text(step, slot) for slot in range(4)]
    return texts


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_plain_decoding_equals_transformers(family, plain_texts):
    theirs = to_transformers(tiny_model(0, family))
    for prompt, ours in zip(PROMPTS, plain_texts[family], strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_length=28, do_sample=False, pad_token_id=0
        )
        assert ours == expected[0].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_greedy_equals_plain_with_k_changing_at_every_step(drafter, family, batch, plain_texts):
    rng = random.Random(f"{drafter}{family}{batch}")
    step = world(drafter, family)
    slots = rng.sample(range(4), batch)
    for slot in slots:
        place(step, slot, PROMPTS[slot], limit=28)
    run_until_done(step, [rng.randrange(6) for _ in range(30)], slots)
    for slot in slots:
        assert text(step, slot) == plain_texts[family][slot]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("k", range(6))
def test_graph_equals_eager_tensor_by_tensor(drafter, k):
    """Everything a step may write, after steps at lengths and contents the trace never saw."""
    steps = [world(drafter), world(drafter)]
    for step in steps:
        place(step, 0, PROMPTS[0], temperature=0.9, seed=1)
        place(step, 2, PROMPTS[3])
    graph = trace_step(steps[0], 4, k)
    for step in steps:
        step.state.set_rows([2, 0, -1, -1])
    for _ in range(8):
        graph.replay()
        with torch.no_grad():
            steps[1](4, k)
        left, right = snapshot(steps[0]), snapshot(steps[1])
        for name in left:
            assert torch.equal(left[name], right[name]), name


def test_same_weights_as_draft_model_accept_everything():
    """A drafter whose cache had a hole would disagree with its twin."""
    step = world("draft-model:tiny")
    place(step, 1, PROMPTS[0])
    for k in (3, 5, 1, 0, 2, 4, 0, 0, 5, 3):
        run(step, [1], k)
    assert step.state.accepted_at[1].tolist() == step.state.drafted_at[1].tolist()
    assert int(step.state.drafted_at[1].sum()) == 23


def test_independent_drafter_is_rarely_right():
    """Stale attention in the drafter would show as acceptance near 1."""
    step = world("draft-model:other")
    place(step, 1, PROMPTS[0])
    for _ in range(15):
        run(step, [1], 3)
    assert int(step.state.accepted_at[1].sum()) < 0.2 * int(step.state.drafted_at[1].sum())


def test_kv_is_that_of_plain_decoding_slot_by_slot():
    """Tokens can agree while the cache is shifted by one."""
    plain, speculative = world("none", invariant=True), world("draft-model:other", invariant=True)
    for step in (plain, speculative):
        place(step, 0, PROMPTS[0])
    for k in (3, 0, 5, 2, 4, 1):
        run(speculative, [0], k)
    while int(plain.state.seq_len[0]) < int(speculative.state.seq_len[0]):
        run(plain, [0], 0)
    # Row-invariant products: not close, equal.
    assert torch.equal(committed_kv(plain, 0), committed_kv(speculative, 0))


@pytest.mark.parametrize("drafter", ["ngram", "early-exit:1", "draft-model:other"])
def test_greedy_in_bfloat16_equals_plain_for_every_k_with_row_invariant_products(drafter):
    def texts(name: str, k: int) -> list[list[int]]:
        model = tiny_model(0, dtype=torch.bfloat16, invariant=True)
        step = tiny_step(name, model=model, draft_seed=1)
        for slot, prompt in enumerate(PROMPTS):
            place(step, slot, prompt, limit=28)
        run_until_done(step, [k] * 30, [0, 1, 2, 3])
        return [text(step, slot) for slot in range(4)]

    plain = texts("none", 0)
    for k in range(1, 6):
        assert texts(drafter, k) == plain, k
