"""The CUDA twins of the graph tests: one `torch.cuda.CUDAGraph` holds the whole step."""

import pytest
import torch
from worlds import place, snapshot, tiny_model, tiny_step

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet

pytestmark = pytest.mark.gpu

DRAFTERS = ("ngram", "early-exit:1", "draft-model:tiny")


def cuda_step(drafter: str):
    return tiny_step(drafter, model=tiny_model(dtype=torch.float32).to("cuda"), draft_seed=1)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_capture_is_a_no_op_and_replay_equals_eager(drafter):
    keys = KeySet(GraphKey(batch, k) for batch in (1, 4) for k in range(4))
    runners = [StepGraphs(cuda_step(drafter), keys, mode=mode, strict=True) for mode in ("FULL", "EAGER")]
    for runner in runners:
        place(runner.step, 0, [3, 1, 4, 1, 5], temperature=0.9, seed=1)
        place(runner.step, 2, [9, 8, 9, 8])
    before = snapshot(runners[0].step)
    runners[0].capture()
    assert all(torch.equal(was, now) for was, now in zip(before.values(), snapshot(runners[0].step).values(), strict=True))
    addresses = {name: buffer.data_ptr() for name, buffer in runners[0].step.named_buffers()}
    for i in range(40):
        for runner in runners:
            runner.step.state.set_rows([2, 0, -1])
            runner.replay(3, i % 4)
        left, right = (snapshot(runner.step) for runner in runners)
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert runners[0].hits == 40
    assert addresses == {name: buffer.data_ptr() for name, buffer in runners[0].step.named_buffers()}


def test_alternating_k_allocates_nothing_after_capture():
    graphs = StepGraphs(cuda_step("draft-model:tiny"), KeySet([GraphKey(2, 1), GraphKey(2, 3)]), strict=True)
    for slot in range(2):
        place(graphs.step, slot, [3, 1, 4, 1, 5])
    graphs.capture()
    graphs.step.state.set_rows([0, 1])
    graphs.replay(2, 3)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    for i in range(100):
        graphs.replay(2, 1 if i % 2 else 3)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
