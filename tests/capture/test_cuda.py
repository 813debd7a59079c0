"""The CUDA twins of the graph tests: `torch.cuda.CUDAGraph`s hold the step."""

import pytest
import torch
from worlds import place, snapshot, tiny_model, tiny_step

from stepgraph.capture.engine import Engine
from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.modes import Mode
from stepgraph.capture.policies import make_policy
from stepgraph.capture.profiling import export_profile
from stepgraph.capture.request import SamplingParams

pytestmark = pytest.mark.gpu

DRAFTERS = ("ngram", "early-exit:1", "draft-model:tiny")
GRAPHED = [Mode.FULL, Mode.THREE_GRAPH, Mode.PIECEWISE]


def cuda_step(drafter: str, **sizes):
    return tiny_step(drafter, model=tiny_model(dtype=torch.float32).to("cuda"), draft_seed=1, **sizes)


def refill(step, slot: int, seed: int) -> None:
    place(step, slot, [3 + slot, 1, 4, 1, 5, seed % 7], temperature=0.9 * (slot % 2), seed=seed)


@pytest.mark.parametrize("mode", GRAPHED)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_capture_is_a_no_op_and_replay_equals_eager(drafter, mode):
    """Cases 21 and 23: 200 steps over block boundaries, k and rows changing, every tensor compared bit for bit."""
    keys = KeySet(GraphKey(batch, k) for batch in (1, 4) for k in range(4))
    runners = [StepGraphs(cuda_step(drafter), keys, mode=chosen, strict=True) for chosen in (mode, Mode.EAGER)]
    for runner in runners:
        for slot in range(4):
            refill(runner.step, slot, slot)
    before = snapshot(runners[0].step)
    runners[0].capture()
    assert all(torch.equal(was, now) for was, now in zip(before.values(), snapshot(runners[0].step).values(), strict=True))
    addresses = {name: buffer.data_ptr() for name, buffer in runners[0].step.named_buffers()}
    for i in range(200):
        rows = [[2, 0, 1, 3], [1], [3, 2, 0, -1]][i % 3]
        for runner in runners:
            runner.step.state.set_rows(rows)
            runner.replay(len(rows), i % 4)
        left, right = (snapshot(runner.step) for runner in runners)
        for name in left:
            assert torch.equal(left[name], right[name]), (i, name)
        for slot in range(4):
            if int(left["state.seq_len"][slot]) > 50:
                for runner in runners:
                    refill(runner.step, slot, i)
    assert runners[0].hits == 200
    assert addresses == {name: buffer.data_ptr() for name, buffer in runners[0].step.named_buffers()}


@pytest.mark.parametrize("mode", GRAPHED)
def test_alternating_k_allocates_nothing_after_capture(mode):
    """Cases 19 and 24."""
    graphs = StepGraphs(cuda_step("draft-model:tiny"), KeySet([GraphKey(2, 1), GraphKey(2, 3)]), mode=mode, strict=True)
    for slot in range(2):
        refill(graphs.step, slot, slot)
    graphs.capture()
    graphs.step.state.set_rows([0, 1])
    graphs.replay(2, 3)
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for i in range(100):
        graphs.replay(2, 1 if i % 2 else 3)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert torch.cuda.memory_reserved() == reserved
    assert len(graphs.captures) == 2


def test_a_replay_never_waits_for_the_device():
    """Case 24: with synchronisation forbidden, replays, row changes and the fetch of results go through."""
    graphs = StepGraphs(cuda_step("early-exit:1"), KeySet([GraphKey(2, 2)]), strict=True)
    for slot in range(3):
        refill(graphs.step, slot, slot)
    graphs.capture()
    graphs.step.state.set_rows([0, 1])
    graphs.replay(2, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graphs.step.state.set_rows([2, 0])
        graphs.replay(2, 2)
        fetched = graphs.step.state.step_results(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(fetched.wait()) == 2


def test_order_of_capture_changes_neither_output_nor_pool():
    """Case 19."""
    outcomes = []
    for order in ([1, 3], [3, 1]):
        graphs = StepGraphs(cuda_step("early-exit:1"), KeySet([GraphKey(2, 1), GraphKey(2, 3)]), strict=True)
        refill(graphs.step, 1, 5)
        for k in order:  # an idle replay captures
            graphs.step.state.set_rows([-1])
            graphs.replay(1, k)
        graphs.step.state.set_rows([1])
        for i in range(10):
            graphs.replay(1, 3 if i % 2 else 1)
        outcomes.append(snapshot(graphs.step))
    assert all(torch.equal(outcomes[0][name], outcomes[1][name]) for name in outcomes[0])


def test_destroy_gives_the_memory_back():
    graphs = StepGraphs(cuda_step("ngram"), KeySet([GraphKey(4, 3)]), strict=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphs.capture()
    graphs.destroy()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.parametrize("mode", list(Mode))
def test_engine_gives_the_same_tokens_in_every_mode_and_at_every_lag(mode):
    texts = []
    for chosen, lag in ((Mode.EAGER, 0), (mode, 0), (mode, 1)):
        policy = make_policy(schedule=[[1, 2, 3], [3, 4, 1]])
        step = cuda_step("early-exit:1", k_max=3)
        engine = Engine(StepGraphs(step, policy.keys(4), mode=chosen, strict=True), policy, lag=lag)
        prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 7, 8], [9, 1]]
        params = [SamplingParams(max_new_tokens=5 + 3 * i, temperature=0.8 * (i % 2), seed=i) for i in range(5)]
        texts.append([output.token_ids for output in engine.generate(prompts, params)])
    assert texts[0] == texts[1] == texts[2]


def test_profile_on_the_device(tmp_path):
    graphs = StepGraphs(cuda_step("ngram"), KeySet([GraphKey(1, 2)]), strict=True)
    refill(graphs.step, 0, 0)
    graphs.capture()
    graphs.step.state.set_rows([0])
    export_profile(graphs, 1, 2, tmp_path / "trace.json", steps=2)
    assert "stepgraph.verify" in (tmp_path / "trace.json").read_text()
