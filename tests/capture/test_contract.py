"""The capture contract: traced as if on CUDA, on a machine without, a step is one graph; a planted fault is named."""

import pytest
import torch
from worlds import place, run, tiny_step

from stepgraph.capture.contract import CaptureContractError
from stepgraph.capture.trace import trace_step
from stepgraph.model.drafters import Proposal
from stepgraph.model.drafters.base import Drafter


@pytest.mark.parametrize("k", range(6))
@pytest.mark.parametrize("drafter", ["none", "ngram", "early-exit:1", "draft-model:tiny", "eagle3:tiny"])
def test_every_step_can_be_one_cuda_graph(drafter, k):
    if drafter == "none" and k:
        pytest.skip("nothing drafts")
    step = tiny_step(drafter, draft_seed=1)
    traced = trace_step(step, 3, k, "cuda")
    devices = {leaf.device.type for node in traced.nodes if isinstance(leaf := node.meta.get("val"), torch.Tensor)}
    assert devices == {"cuda"}
    here = trace_step(step, 3, k)
    assert [str(node.target) for node in traced.nodes] == [str(node.target) for node in here.nodes]


def test_a_step_without_storage_can_be_traced():
    step = tiny_step("ngram").to("meta")
    assert len(trace_step(step, 2, 1, "cuda").nodes) == len(trace_step(tiny_step("ngram"), 2, 1).nodes)
    assert trace_step(tiny_step("eagle3:tiny").to("meta"), 2, 3, "cuda").nodes


class Faulty(Drafter):
    """Proposes token 1 and does something that no graph can hold."""

    name = "faulty"

    def __init__(self, fault):
        super().__init__()
        self.fault, self.kept = fault, None

    def propose(self, rows, k):
        tokens = torch.ones_like(rows.seq_len)[:, None].expand(-1, k).contiguous()
        self.fault(self, rows, tokens)
        return Proposal(tokens, None)


def reads_item(drafter, rows, tokens):
    return rows.seq_len[0].item()


def reads_list(drafter, rows, tokens):
    return rows.seq_len.tolist()


def branches(drafter, rows, tokens):
    return 1 if rows.live.any() else 0


def masks(drafter, rows, tokens):
    return tokens[rows.live]


def finds(drafter, rows, tokens):
    return rows.live.nonzero()


def indexes_by_list(drafter, rows, tokens):
    return tokens[[0, 1]]


def takes_host_tensor(drafter, rows, tokens):
    return tokens + torch.tensor([[1]])


def copies_scalar(drafter, rows, tokens):
    return torch.tensor(3).to(tokens.device)


def draws(drafter, rows, tokens):
    return torch.rand(3, device=tokens.device)


def keeps(drafter, rows, tokens):
    drafter.kept = tokens + 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (reads_item, "_local_scalar_dense.*return rows.seq_len\\[0\\].item\\(\\).*reads a tensor on the host"),
        (reads_list, "test_contract.py:.*reads a tensor on the host"),
        (branches, "return 1 if rows.live.any\\(\\).*reads a tensor on the host"),
        (masks, "aten.index.*tokens\\[rows.live\\].*shape that depends on data"),
        (finds, "aten.nonzero.*shape that depends on data"),
        (indexes_by_list, "tokens\\[\\[0, 1\\]\\].*takes a tensor from the host"),
        (takes_host_tensor, "torch.tensor\\(\\[\\[1\\]\\]\\).*takes a tensor from the host"),
        (copies_scalar, "takes a tensor from the host"),
        (draws, "aten.rand.*draws from a random generator"),
        (keeps, "drafter.kept"),
    ],
)
def test_planted_faults_are_named(fault, message):
    """Case 24."""
    step = tiny_step(Faulty(fault))
    with pytest.raises(CaptureContractError, match=message):
        trace_step(step, 2, 2, "cuda")


def test_faults_are_found_on_the_cpu_too():
    for fault in (reads_item, masks, draws, keeps):
        with pytest.raises(CaptureContractError):
            trace_step(tiny_step(Faulty(fault)), 2, 2)


def test_healthy_twin_of_the_faulty_drafter_runs():
    step = tiny_step(Faulty(lambda *args: None))
    place(step, 0, [1, 2])
    run(step, [0], 2)
    trace_step(step, 2, 2, "cuda")
