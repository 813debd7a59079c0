"""FULL, THREE_GRAPH, PIECEWISE and EAGER are the same step, cut at other places."""

import pytest
import torch
from worlds import place, snapshot, text, tiny_model, tiny_step

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.modes import Mode
from stepgraph.capture.phases import PHASES, phase_of
from stepgraph.capture.pieces import ATTENTION, cut, pieces_of
from stepgraph.capture.trace import trace_step

DRAFTERS = ("none", "ngram", "early-exit:1", "draft-model:tiny", "eagle3:tiny", "hybrid:2:eagle3:tiny")
GRAPHED = [Mode.FULL, Mode.THREE_GRAPH, Mode.PIECEWISE]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_modes_agree_bit_for_bit_while_k_changes(drafter):
    ks = (0,) if drafter == "none" else (3, 0, 1, 2) if drafter == "ngram" else (2, 0)
    keys = KeySet(GraphKey(4, k) for k in ks)
    runs = {}
    for mode in Mode:
        step = tiny_step(drafter, draft_seed=1)
        for slot in range(3):
            place(step, slot, [4, 5, slot, 4, 5], temperature=0.6 * slot, seed=slot)
        graphs = StepGraphs(step, keys, mode=mode, strict=True)
        graphs.capture()
        step.state.set_rows([2, 0, 1])
        for i in range(12):
            graphs.replay(3, ks[i % len(ks)])
        runs[mode] = snapshot(step)
        assert len(text(step, 0)) > 12
    for mode in Mode:
        for name, buffer in runs[Mode.EAGER].items():
            # The eager run has no bucket: its batch is 3, so there is no row 3 to have a result.
            rows = slice(0, 3) if name in ("state.results", "state.slots") else slice(None)
            assert torch.equal(buffer[rows], runs[mode][name][rows]), (mode, name)


@pytest.mark.parametrize("mode", GRAPHED)
@pytest.mark.parametrize("drafter", DRAFTERS[1:])
def test_where_the_cuts_are(drafter, mode):
    step = tiny_step(drafter, draft_seed=1)
    traced = trace_step(step, 2, 3)
    pieces = pieces_of(traced, mode)
    assert [node for _, nodes in pieces for node in nodes] == traced.nodes  # nothing lost, nothing moved
    attention = sum(node.target is ATTENTION for node in traced.nodes)
    assert attention >= step.target.config.num_layers
    if mode is Mode.FULL:
        assert [eager for eager, _ in pieces] == [False]
    elif mode is Mode.PIECEWISE:
        alone = [nodes for eager, nodes in pieces if eager and nodes[0].target is ATTENTION]
        assert len(alone) == attention
        assert all(len(nodes) == 1 for nodes in alone)
        assert not any(node.target is ATTENTION for eager, nodes in pieces if not eager for node in nodes)
    else:
        graphs = [{phase_of(node) for node in nodes} for eager, nodes in pieces if not eager]
        observes = [{"observe"}] if "eagle3" in drafter else []  # the others have nothing to do there
        assert graphs == [{"draft"}, {"verify"}, *observes]
        assert {phase_of(node) for eager, nodes in pieces if eager for node in nodes} == {"accept", "advance"}
    graph, described = cut(traced, mode)
    assert sum(piece.nodes for piece in described) == len(traced.nodes)
    assert len([node for node in graph.graph.graph.nodes if node.op == "call_module"]) == len(pieces)


def test_phases_come_in_order_and_every_node_has_one():
    for drafter, observed in (("draft-model:tiny", set()), ("eagle3:tiny", {"observe"})):
        traced = trace_step(tiny_step(drafter, draft_seed=1), 2, 3)
        order = [PHASES.index(phase_of(node)) for node in traced.nodes]
        assert order == sorted(order)
        assert {PHASES[i] for i in order} == {"draft", "verify", "accept", "advance"} | observed


def test_at_k_0_drafters_without_state_are_no_part_of_the_step():
    def ops(drafter):
        return [str(node.target) for node in trace_step(tiny_step(drafter, draft_seed=1), 2, 0).nodes]

    assert ops("ngram") == ops("early-exit:1") == ops("none")
    assert len(ops("draft-model:tiny")) > len(ops("none"))  # it has a cache to keep up


@pytest.mark.parametrize("mode", GRAPHED)
def test_capture_is_a_no_op_on_everything(mode):
    """Case 21: every tensor holds a pattern, everything is captured, every tensor still holds it."""
    step = tiny_step("draft-model:tiny", draft_seed=1)
    for slot in range(4):
        place(step, slot, [slot, 2, 3])
    step.state.set_rows([3, 1, 0])
    for i, buffer in enumerate(step.buffers()):
        if buffer.is_floating_point() and buffer.dim() > 2:
            buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(i)))
    before = snapshot(step)
    StepGraphs(step, KeySet(GraphKey(b, k) for b in (1, 4) for k in (0, 2)), mode=mode).capture()
    assert all(torch.equal(was, now) for was, now in zip(before.values(), snapshot(step).values(), strict=True))


def test_weights_that_moved_are_captured_again():
    step = tiny_step("ngram", model=tiny_model())
    place(step, 0, [1, 2, 1])
    graphs = StepGraphs(step, KeySet([GraphKey(1, 1)]))
    graphs.capture()
    first = graphs[GraphKey(1, 1)]
    graphs.capture()
    assert graphs[GraphKey(1, 1)] is first
    step.target.norm = torch.nn.Parameter(-step.target.norm, requires_grad=False)
    graphs.capture()
    assert graphs[GraphKey(1, 1)] is not first
    eager = tiny_step("ngram", model=step.target)
    place(eager, 0, [1, 2, 1])
    place(step, 0, [1, 2, 1])
    for runner in (graphs, StepGraphs(eager, KeySet([]), mode="EAGER")):
        runner.step.state.set_rows([0])
        for _ in range(5):
            runner.replay(1, 1)
    assert text(step, 0) == text(eager, 0)


def test_report_rows():
    step = tiny_step("ngram")
    place(step, 0, [1, 2, 1])
    graphs = StepGraphs(step, KeySet([GraphKey(1, 0), GraphKey(2, 1)]))
    graphs.capture()
    step.state.set_rows([0])
    graphs.replay(1, 1)
    rows = {(row["batch"], row["k"]): row for row in graphs.rows()}
    assert rows[2, 1]["replays"] == 1
    assert rows[1, 0]["replays"] == 0
    assert rows[2, 1]["nodes"] > rows[1, 0]["nodes"] > 20
    assert all(row["capture_s"] > 0 and row["bytes"] == 0 for row in rows.values())
    assert graphs.eager_reason is None
