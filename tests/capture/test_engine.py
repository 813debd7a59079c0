"""Continuous batching: requests join, leave and are counted rightly (cases 9, 17, 18, 29, 43, 45, 46)."""

import random

import pytest
import torch
from worlds import ScriptedDrafter, place, run, text, tiny_model, tiny_step

from stepgraph.capture.blocks import BlockTables
from stepgraph.capture.engine import Engine
from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import KeySet
from stepgraph.capture.policies import FixedPolicy
from stepgraph.capture.request import FinishReason, SamplingParams
from stepgraph.model.drafters import Drafter

DRAFTERS = ("ngram", "early-exit:1", "draft-model:tiny")


class WalkPolicy(FixedPolicy):
    """Asks for k in the order of a list, and remembers what it was told."""

    def __init__(self, walk: list[int]):
        super().__init__(0)
        self.walk, self.observed, self.batches = walk, [], []

    @property
    def ks(self):
        return frozenset(self.walk)

    def keys(self, max_batch, rungs=None):
        return KeySet.for_policy(self.ks, max_batch, rungs)

    def choose(self, batch, context=None, requests=None):
        self.batches.append(batch)
        return self.walk[(len(self.batches) - 1) % len(self.walk)]

    def observe(self, k_run, accepted, lag=0, requests=None):
        self.observed.append((k_run, list(accepted)))


def engine_of(drafter: str | Drafter = "ngram", walk=(3,), *, model=None, mode="EAGER", seed=0, chunk=256, **sizes) -> Engine:
    walk = [walk] if isinstance(walk, int) else list(walk)
    step = tiny_step(drafter, model=model, draft_seed=1, k_max=max(walk), **sizes)
    policy = WalkPolicy(walk)
    graphs = StepGraphs(step, policy.keys(step.state.num_slots), mode=mode)
    return Engine(graphs, policy, prefill_chunk=chunk, seed=seed)


def prompts_of(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(61) for _ in range(rng.randrange(1, 24))] for _ in range(count)]


def generate_alone(prompt, params, **options) -> list[int]:
    return engine_of(**options).generate([prompt], params)[0].token_ids


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_requests_that_come_and_go_get_the_text_they_get_alone(drafter):
    rng = random.Random(1)
    prompts = prompts_of(rng, 9)
    params = [SamplingParams(max_new_tokens=rng.randrange(1, 16)) for _ in prompts]
    engine = engine_of(drafter, [2, 0, 3, 1], mode="FULL", chunk=5, num_slots=3)
    pending, outputs = list(zip(prompts, params, strict=True)), {}
    order = {}
    while pending or engine.unfinished:
        if pending and rng.random() < 0.4:
            prompt, own = pending.pop(0)
            order[engine.add(prompt, own)] = (prompt, own)
        for output in engine.step() if engine.unfinished else []:
            outputs[output.id] = output
    assert len(outputs) == 9
    for request_id, (prompt, own) in order.items():
        assert outputs[request_id].token_ids == generate_alone(prompt, own, drafter="none", walk=0)
        assert outputs[request_id].finish_reason is FinishReason.LENGTH
    assert engine.scheduler.blocks.available == engine.scheduler.blocks.capacity
    assert sorted(engine.scheduler.free_slots) == [0, 1, 2]
    assert engine.graphs.misses == 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_seed_belongs_to_its_request(drafter):
    """Case 9: alone, among 1 to 7 neighbours, in another slot, padded to 8, graph or eager."""
    model = tiny_model(invariant=True)
    mine, params = [5, 6, 7, 5, 6], SamplingParams(max_new_tokens=10, temperature=0.9, seed=42)
    options = {"drafter": drafter, "walk": 2, "model": model, "num_slots": 8}
    alone = generate_alone(mine, params, **options)
    rng = random.Random(0)
    for neighbours in range(1, 8):
        others = prompts_of(rng, neighbours)
        place_of_mine = rng.randrange(neighbours + 1)
        crowd = [*others[:place_of_mine], mine, *others[place_of_mine:]]
        each = [SamplingParams(max_new_tokens=12, temperature=1.1)] * neighbours
        each.insert(place_of_mine, params)
        engine = engine_of(**options, mode="FULL" if neighbours in (2, 5) else "EAGER", seed=neighbours)
        assert engine.generate(crowd, each)[place_of_mine].token_ids == alone
    assert generate_alone(mine, SamplingParams(max_new_tokens=10, temperature=0.9, seed=43), **options) != alone


def test_a_hundred_replays_draw_a_hundred_times():
    """Case 9: on fixed inputs (a flat target) only the counters change from replay to replay."""
    model = tiny_model()
    model.lm_head.data.zero_()
    engine = engine_of("none", 0, model=model, mode="FULL", max_len=128)
    tokens = engine.generate([[1]], SamplingParams(max_new_tokens=100, temperature=1.0))[0].token_ids
    counts = torch.bincount(torch.tensor(tokens), minlength=61)
    assert engine.graphs.hits == 100
    # 100 draws of 61 equally likely tokens: chi-square with 60 dof, far tail.
    assert float(((counts - 100 / 61) ** 2 / (100 / 61)).sum()) < 110
    assert all(tokens[i : i + 3] != tokens[i + 3 : i + 6] for i in range(94))


@pytest.mark.parametrize("k", range(1, 8))
def test_prompts_and_chunk_tails_of_query_length_are_prefilled(k):
    """Case 17: k + 1 prompt tokens look like a verification and are not one."""
    expected = None
    for chunk in (256, k + 1, 1):
        engine = engine_of("ngram", k, chunk=chunk)
        chunks = []
        prefill = engine.graphs.step.prefill
        engine.graphs.step.prefill = lambda slot, tokens, start, p=prefill, c=chunks: (
            c.append(len(tokens)),
            p(slot, tokens, start),
        )
        prompts = [list(range(1, k + 2)), list(range(1, 2 * k + 3))]
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=5))
        assert sum(chunks) == sum(len(prompt) - 1 for prompt in prompts)
        assert all(len(output.token_ids) == 5 for output in outputs)
        texts = [output.token_ids for output in outputs]
        assert texts == (expected := expected or texts)
    assert expected == [generate_alone(prompt, SamplingParams(max_new_tokens=5), drafter="none", walk=0) for prompt in prompts]


def test_a_newcomer_without_drafts_joins_in_one_graph():
    """Case 18: one token, nothing to look up; its row is padded with "no draft" and emits exactly one token."""
    engine = engine_of("ngram", 3, mode="FULL", num_slots=2)
    old = engine.add([7, 8, 9, 7, 8, 9, 7, 8], SamplingParams(max_new_tokens=20))
    for _ in range(2):
        engine.step()
    new = engine.add([3], SamplingParams(max_new_tokens=20))
    replays = engine.graphs.hits
    engine.step()
    request = engine._requests[new]
    assert engine.graphs.hits == replays + 1
    progress = engine.scheduler.progress(request)
    assert (len(progress.token_ids), progress.steps, sum(progress.drafted_at)) == (1, 1, 0)
    assert sum(engine.scheduler.progress(engine._requests[old]).drafted_at) > 0
    assert engine.policy.batches[-1] == 2


def test_prefilling_requests_do_not_count_as_batch():
    """Case 42."""
    engine = engine_of("ngram", 1, chunk=4, num_slots=3)
    engine.add([1, 2], SamplingParams(max_new_tokens=30))
    engine.step()
    engine.add(list(range(1, 22)), SamplingParams(max_new_tokens=4))
    for _ in range(5):
        engine.step()
    assert engine.policy.batches == [1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_memory_follows_the_text_over_a_random_walk_of_k(drafter):
    """Case 29: committed ≤ allocated, and allocated − committed ≤ what k_max can use."""
    rng = random.Random(drafter)
    block_size, k_max = 4, 5
    engine = engine_of(drafter, [rng.randrange(6) for _ in range(97)] + [5], num_slots=3, block_size=block_size)
    for step_number in range(120):
        if engine.unfinished < 4:
            engine.add(prompts_of(rng, 1)[0], SamplingParams(max_new_tokens=rng.randrange(1, 30)))
        engine.step()
        scheduler = engine.scheduler
        blocks = scheduler.blocks
        held = {request.slot: int(blocks.count[request.slot]) for request in scheduler.running + scheduler.prefilling}
        assert sum(held.values()) + blocks.free == blocks.capacity, step_number
        named = [block for slot, count in held.items() for block in blocks.table[slot, :count].tolist()]
        assert len(set(named)) == len(named)
        assert all(0 < block <= blocks.capacity for block in named)
        for request in scheduler.running:
            committed = int(engine.graphs.step.state.seq_len[request.slot])
            allocated = held[request.slot] * block_size
            on_device = engine.graphs.step.state.block_table[request.slot, : held[request.slot]]
            assert on_device.tolist() == blocks.table[request.slot, : held[request.slot]].tolist()
            assert committed <= allocated
            assert allocated - committed <= k_max + block_size
            assert blocks.most[request.slot] == scheduler.most_blocks(request)


def test_waiting_requests_wait_for_memory_and_all_finish():
    """Four slots, blocks for two requests."""
    step = tiny_step("ngram", num_slots=4, max_len=64, block_size=4)
    policy = WalkPolicy([2])
    engine = Engine(StepGraphs(step, policy.keys(4), mode="EAGER"), policy)
    engine.scheduler.blocks = BlockTables(11, 4, 4, 16)
    outputs = engine.generate([[i + 1] * 8 for i in range(6)], SamplingParams(max_new_tokens=12))
    assert [len(output.token_ids) for output in outputs] == [12] * 6
    assert max(policy.batches) == 2
    with pytest.raises(ValueError, match="needs 11 KV blocks of 4 tokens; the cache has 10"):
        engine.add([1] * 30, SamplingParams(max_new_tokens=12))


def test_acceptance_by_position_has_its_own_denominators():
    """Case 43: k = 3 with all accepted, then k = 1 accepted → rates [1, 1, 1] over counts [2, 1, 1]."""
    prompt = [3, 1, 4, 1, 5, 9]
    plain = tiny_step("none")
    place(plain, 0, prompt)
    for _ in range(6):
        run(plain, [0], 0)
    drafter = ScriptedDrafter(4, 64)
    engine = engine_of(drafter, [3, 1])
    answer = text(plain, 0)
    drafter.script[:, : len(answer)] = torch.tensor(answer)
    engine.generate([prompt], SamplingParams(max_new_tokens=6))
    report = engine.report()
    assert engine.stats.drafted_at == [2, 1, 1]
    assert report["per_position_acceptance"] == [1.0, 1.0, 1.0]
    assert engine.policy.observed == [(3, [3]), (1, [1])]
    assert (report["acceptance_length"], report["drafted_per_step"], report["accepted_per_step"]) == (3.0, 2.0, 2.0)


def test_figures_without_drafts_divide_by_nothing():
    """Cases 43, 45."""
    engine = engine_of("none", 0)
    assert engine.report()["acceptance_length"] is None
    engine.generate([[1, 2]], SamplingParams(max_new_tokens=3))
    report = engine.report()
    assert report["per_position_acceptance"] == []
    assert (report["acceptance_length"], report["drafted_per_step"], report["accepted_per_step"]) == (1.0, 0.0, 0.0)


def test_a_drafter_that_never_drafts_says_so():
    """Case 46."""
    with pytest.warns(UserWarning, match="drafter ngram is loaded but never drafts: k is 0 at every batch"):
        engine_of("ngram", 0)


def test_aborted_request_keeps_its_text_and_frees_its_memory():
    engine = engine_of("ngram", 2)
    first = engine.add([1, 2, 3], SamplingParams(max_new_tokens=20))
    waiting = engine.add([4] * 30, SamplingParams(max_new_tokens=20))
    for _ in range(3):
        engine.step()
    output = engine.abort(first)
    assert output.finish_reason is FinishReason.ABORTED
    assert len(output.token_ids) >= 3
    assert engine.abort(waiting).finish_reason is FinishReason.ABORTED
    assert engine.unfinished == 0
    assert engine.scheduler.blocks.available == engine.scheduler.blocks.capacity
    with pytest.raises(ValueError, match="request 0 is not running"):
        engine.abort(first)


def test_interrupt_returns_what_there_is():
    engine = engine_of("ngram", 2, num_slots=1)
    healthy, calls = engine.graphs.replay, []

    def replay(batch, k):
        calls.append(k)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return healthy(batch, k)

    engine.graphs.replay = replay
    outputs = engine.generate([[1, 2, 3], [4, 5]], SamplingParams(max_new_tokens=50))
    assert engine.interrupted
    assert [output.finish_reason for output in outputs] == [FinishReason.ABORTED] * 2
    assert len(outputs[0].token_ids) >= 3
    assert outputs[1].token_ids == []
    assert engine.unfinished == 0


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], SamplingParams(), "a prompt is empty"),
        ([61], SamplingParams(), "token id 61; allowed are integers from 0 to 60"),
        ([-1], SamplingParams(), "token id -1"),
        ([1.5], SamplingParams(), "token id 1.5"),
        ([True], SamplingParams(), "token id True"),
        ([1] * 64, SamplingParams(), "the prompt has 64 tokens; max_len=64 leaves room for 63"),
        ("text", SamplingParams(), "no tokenizer"),
    ],
)
def test_bad_prompts_leave_nothing_behind(prompt, params, message):
    engine = engine_of("ngram", 1)
    with pytest.raises(ValueError, match=message):
        engine.generate([[1, 2], prompt], params)
    assert engine.unfinished == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"min_p": 2}, "min_p is 2"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"stop_ids": tuple(range(9))}, "at most 8"),
        ({"draft_limit": -1}, "draft_limit is -1"),
    ],
)
def test_sampling_parameters_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_engine_refuses_a_policy_that_cannot_run():
    step = tiny_step("none", k_max=2)
    with pytest.raises(ValueError, match="without a drafter only k=0"):
        Engine(StepGraphs(step, WalkPolicy([2]).keys(4)), WalkPolicy([2]))
    with pytest.raises(ValueError, match="k=4; the state was made for k up to 2"):
        Engine(StepGraphs(tiny_step("ngram", k_max=2), WalkPolicy([2]).keys(4)), WalkPolicy([4]))
