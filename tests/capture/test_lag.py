"""Steps launched before the last one's results are read: the same tokens, no block too few, and the log says how late."""

import json
import random
from dataclasses import asdict

import pytest
import torch
from worlds import place, tiny_model, tiny_step

from stepgraph.capture.cli import main
from stepgraph.capture.engine import Engine
from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.policies import FixedPolicy, make_policy
from stepgraph.capture.profiling import export_profile
from stepgraph.capture.request import FinishReason, SamplingParams


def engine_of(lag, drafter="early-exit:1", policy=None, mode="FULL", **sizes):
    policy = policy or make_policy(schedule=[[1, 1, 3], [2, 2, 1], [3, 4, 2]])
    step = tiny_step(drafter, model=tiny_model(invariant=True), draft_seed=1, k_max=max(policy.ks), **sizes)
    return Engine(StepGraphs(step, policy.keys(step.state.num_slots), mode=mode, strict=True), policy, lag=lag)


@pytest.mark.parametrize("drafter", ["ngram", "early-exit:1", "draft-model:tiny"])
def test_tokens_acceptance_and_counters_do_not_depend_on_the_lag(drafter):
    rng = random.Random(3)
    prompts = [[rng.randrange(61) for _ in range(rng.randrange(1, 20))] for _ in range(7)]
    params = [
        SamplingParams(
            max_new_tokens=rng.randrange(1, 20), temperature=0.7 * (i % 2), seed=i, logprobs=i % 3 == 0,
            stop_ids=tuple(rng.sample(range(61), 4)),
        )
        for i in range(7)
    ]  # fmt: skip
    policy = FixedPolicy(3)  # so that a request's steps do not depend on who runs beside it
    runs = [engine_of(lag, drafter, policy).generate(prompts, params) for lag in (0, 1)]
    for eager, late in zip(*runs, strict=True):
        assert late.token_ids == eager.token_ids
        assert late.finish_reason == eager.finish_reason
        assert (late.steps, late.drafted_at, late.accepted_at) == (eager.steps, eager.drafted_at, eager.accepted_at)
        assert late.logprobs == eager.logprobs
        assert late.logprobs is None or len(late.logprobs) == len(late.token_ids)
    assert {output.finish_reason for output in runs[0]} == {FinishReason.LENGTH, FinishReason.STOP}


def test_blocks_cover_what_is_in_flight():
    """Every written position lies in a block of the request, at the worst: all drafts accepted, block of one token."""
    engine = engine_of(1, "early-exit:2", FixedPolicy(3), block_size=1)  # the whole model drafts: all is accepted
    grown = []
    replay = engine.graphs.replay

    def checked(batch, k):
        for request in engine.scheduler.running:
            flying = sum(step.k + 1 for step in engine._in_flight if request in step.rows.requests)
            length = int(engine.scheduler.ledger.length[request.slot])
            grown.append((int(engine.scheduler.blocks.count[request.slot]), min(length + flying + k, request.limit - 1)))
        return replay(batch, k)

    engine.graphs.replay = checked
    output = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=33))[0]
    assert all(blocks >= needed for blocks, needed in grown)
    assert (
        output.token_ids
        == engine_of(0, "none", FixedPolicy(0)).generate([[1, 2, 3]], SamplingParams(max_new_tokens=33))[0].token_ids
    )
    assert sum(output.accepted_at) == sum(output.drafted_at)
    assert engine.scheduler.blocks.available == engine.scheduler.blocks.capacity


def test_no_step_is_launched_for_requests_that_are_surely_done():
    engine = engine_of(1, "none", FixedPolicy(0))
    engine.generate([[1]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert engine.stats.steps == 4


def test_log_of_steps():
    engine, records = engine_of(1), []
    engine.graphs = StepGraphs(engine.graphs.step, KeySet(GraphKey(4, k) for k in (1, 2, 3)))
    engine.on_step = records.append
    engine.generate([[1, 2], [3], [4]], [SamplingParams(max_new_tokens=n) for n in (2, 9, 14)])
    assert [record.step for record in records] == list(range(engine.stats.steps))
    assert records[0].k_asked == records[0].k_run == 2
    assert records[0].key == "4x2"
    assert records[0].padding == 1
    assert records[0].reason is None
    assert {record.lag for record in records} == {0, 1}
    assert records[-1].lag == 0
    assert sum(sum(record.drafted) for record in records) == sum(engine.stats.drafted_at)
    assert sum(len(record.accepted) for record in records) == engine.stats.request_steps
    json.dumps(asdict(records[0]))


def test_log_says_why_a_step_was_not_a_graph():
    engine, records = engine_of(0, mode="EAGER"), []
    engine.on_step = records.append
    engine.generate([[1, 2]], SamplingParams(max_new_tokens=3))
    assert {(record.key, record.reason, record.padding) for record in records} == {(None, "mode is EAGER", 0)}


def test_abort_while_a_step_is_in_flight_leaves_nothing_behind():
    engine = engine_of(1)
    first = engine.add([1, 2, 3], SamplingParams(max_new_tokens=30))
    for _ in range(3):
        engine.step()
    engine.abort(first)
    second = engine.add([4, 5], SamplingParams(max_new_tokens=8))
    outputs = []
    while engine.unfinished:
        outputs += engine.step()
    assert [output.id for output in outputs] == [second]
    assert outputs[0].token_ids == engine_of(0).generate([[4, 5]], SamplingParams(max_new_tokens=8))[0].token_ids


@pytest.mark.parametrize("lag", [-1, 2, True, 0.5])
def test_bad_lag(lag):
    with pytest.raises(ValueError, match="lag is"):
        engine_of(lag)


def test_command_line_log(tmp_path, capsys):
    log = tmp_path / "steps.jsonl"
    tiny = ["generate", "1,2,3", "--model", "random:tiny-llama", "--max-len", "64", "--mode", "PIECEWISE"]
    assert main([*tiny, "--max-new-tokens", "5", "--lag", "1", "--log-steps", str(log), "--json", "-", "--graphs"]) == 0
    records = [json.loads(line) for line in log.read_text().splitlines()]
    printed = capsys.readouterr()
    document = json.loads(printed.out.splitlines()[-1])
    assert "capture s" in printed.err
    assert len(records) == document["stats"]["steps"]
    assert set(records[0]) == {
        "step", "batch", "k_asked", "k_run", "key", "reason", "padding", "requests", "drafted", "accepted", "lag",
    }  # fmt: skip
    assert main([*tiny, "--log-steps", str(tmp_path / "missing" / "x")]) == 2
    assert "--log-steps is" in capsys.readouterr().err


def test_profile_has_the_phases_by_name(tmp_path):
    step = tiny_step("early-exit:1")
    place(step, 0, [1, 2, 1])
    step.state.set_rows([0])
    graphs = StepGraphs(step, KeySet([GraphKey(2, 2)]))
    export_profile(graphs, 1, 2, tmp_path / "trace.json", steps=2)
    names = [event.get("name") for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    for name in ("draft", "verify", "accept", "advance"):
        assert names.count(f"stepgraph.{name}") == 2
    assert names.count("stepgraph.step 2x2") == 2
    assert "stepgraph::uniform_decode_attention" in names
    eager = tiny_step("early-exit:1")
    place(eager, 0, [1, 2, 1])
    eager.state.set_rows([0])
    for _ in range(2):
        with torch.no_grad():
            eager(1, 2)
    assert torch.equal(step.state.history, eager.state.history)
