"""`StepGraphs`: captures change nothing, replays equal eager, misses are counted and explained (cases 19 to 21, 23)."""

import random
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import place, snapshot, text, tiny_step

from stepgraph.capture import backends
from stepgraph.capture.graphs import CaptureError, EagerFallback, StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.capture.modes import Mode
from stepgraph.capture.trace import trace_step
from stepgraph.kernels.attention import uniform_decode_attention
from stepgraph.kernels.registry import NoImplementation, implementation_on_cpu, use_implementation

DRAFTERS = ("ngram", "early-exit:1", "draft-model:tiny")
PROMPT = [3, 1, 4, 1, 5, 9, 3, 1, 4]


def all_keys(batches, ks) -> KeySet:
    return KeySet(GraphKey(batch, k) for batch in batches for k in ks)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_capture_is_a_no_op(drafter):
    step = tiny_step(drafter)
    for name, buffer in step.named_buffers():
        if not name.endswith("rope"):
            buffer.fill_(3)
    before = snapshot(step)
    graphs = StepGraphs(step, all_keys((1, 4), range(4)))
    graphs.capture()
    assert len(graphs.captured) == 8
    for name, was in before.items():
        assert torch.equal(was, dict(step.named_buffers())[name]), name


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_replay_equals_eager_for_200_steps(drafter):
    """Case 23: k, batch and rows change at every step, requests end and are replaced; every tensor is compared."""
    rng = random.Random(drafter)
    left, right = tiny_step(drafter, draft_seed=1), tiny_step(drafter, draft_seed=1)
    graphs = StepGraphs(left, all_keys((2, 4), range(6)))
    eager = StepGraphs(right, all_keys((2, 4), range(6)), mode="EAGER")

    def refill(slot):
        prompt = [rng.randrange(1, 12) for _ in range(rng.randrange(1, 20))]
        options = {"temperature": rng.choice([0.0, 0.7, 1.3]), "seed": rng.randrange(100), "limit": rng.randrange(25, 65)}
        for step in (left, right):
            place(step, slot, prompt, **options)

    for slot in range(4):
        refill(slot)
    for _ in range(200):
        slots = rng.sample(range(4), rng.randrange(1, 5))
        k = rng.randrange(6)
        for runner in (graphs, eager):
            runner.step.state.set_rows(slots)
            runner.replay(len(slots), k)
        was, now = snapshot(right), snapshot(left)
        for name in was:
            assert torch.equal(was[name], now[name]), name
        for slot in range(4):
            if int(left.state.finished[slot]):
                refill(slot)
    assert (graphs.hits, graphs.misses, len(graphs.captures)) == (200, 0, 12)
    assert (eager.hits, eager.misses) == (0, 0)


def test_alternating_k_captures_twice_and_stays_flat():
    """Case 19."""
    step = tiny_step("ngram", max_len=512)
    place(step, 0, PROMPT)
    graphs = StepGraphs(step, all_keys((1,), (1, 3)))
    addresses = {name: buffer.data_ptr() for name, buffer in step.named_buffers()}
    for i in range(100):
        step.state.set_rows([0])
        graphs.replay(1, 3 if i % 2 else 1)
    assert len(graphs.captures) == 2
    assert graphs.replays == {GraphKey(1, 1): 50, GraphKey(1, 3): 50}
    assert addresses == {name: buffer.data_ptr() for name, buffer in step.named_buffers()}


def test_order_of_capture_changes_nothing():
    texts = []
    for order in ([1, 3], [3, 1]):
        step = tiny_step("early-exit:1")
        place(step, 0, PROMPT, temperature=1.0, seed=5)
        graphs = StepGraphs(step, all_keys((1,), (1, 3)))
        for k in order:  # an idle replay captures
            step.state.set_rows([-1])
            graphs.replay(1, k)
        for i in range(10):
            step.state.set_rows([0])
            graphs.replay(1, 3 if i % 2 else 1)
        texts.append((text(step, 0), step.state.accepted_at.tolist()))
    assert texts[0] == texts[1]


def test_key_outside_the_set_runs_eager_and_says_why():
    """Case 20."""
    outcomes = []
    for keys in (all_keys((1, 4), (3,)), all_keys((1,), (3,))):
        step = tiny_step("ngram")
        for slot in range(3):
            place(step, slot, PROMPT)
        graphs = StepGraphs(step, keys)
        step.state.set_rows([0, 1, 2])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                graphs.replay(3, 3)
        outcomes.append((snapshot(step), graphs.misses, [str(w.message) for w in caught]))
    (hit, misses, silent), (missed, counted, said) = outcomes
    assert (misses, silent) == (0, [])
    assert counted == 3
    assert said == ["the step runs EAGER: no graph was asked for that holds batch 3 at k=3"]
    for name in hit:
        if name not in ("state.slots", "state.results"):  # padding rows of the bucket
            assert torch.equal(hit[name], missed[name]), name


def test_strict_mode_raises_before_it_runs():
    step = tiny_step("ngram")
    place(step, 0, PROMPT)
    graphs = StepGraphs(step, all_keys((1,), (3,)), strict=True)
    step.state.set_rows([0])
    before = snapshot(step)
    with pytest.raises(CaptureError, match="batch 1 at k=2"):
        graphs.replay(1, 2)
    assert all(torch.equal(before[name], now) for name, now in snapshot(step).items())


def test_failed_capture_falls_back_with_the_same_numbers(monkeypatch):
    def refuses(step, batch, k):
        raise RuntimeError("out of graph memory")

    good, bad = tiny_step("ngram"), tiny_step("ngram")
    for step in (good, bad):
        place(step, 0, PROMPT)
        step.state.set_rows([0])
    healthy = StepGraphs(good, all_keys((1,), (3,)))
    healthy.replay(1, 3)
    monkeypatch.setattr(backends, "trace_step", refuses)
    broken = StepGraphs(bad, all_keys((1,), (3,)))
    broken.capture()
    with pytest.warns(EagerFallback, match="capture of batch 1 at k=3 failed: RuntimeError: out of graph memory"):
        broken.replay(1, 3)
    assert (broken.hits, broken.misses) == (0, 1)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(good).values(), snapshot(bad).values(), strict=True))
    with pytest.raises(CaptureError, match="out of graph memory"):
        StepGraphs(bad, all_keys((1,), (3,)), strict=True).capture()


def test_host_read_in_the_step_cannot_be_captured():
    step = tiny_step("ngram")
    healthy_rows = step.state.rows
    step.state.rows = lambda *args: (step.state.seq_len[0].item(), healthy_rows(*args))[1]
    with pytest.raises(Exception, match="_local_scalar_dense"):
        trace_step(step, 1, 2)


def test_graph_names_the_ops_and_the_tensors():
    traced = trace_step(tiny_step("draft-model:tiny"), 2, 3)
    ops = [str(node.target) for node in traced.graph.graph.nodes if node.op == "call_function"]
    count = {name: sum(f"stepgraph.{name}." in op for op in ops) for name in ("uniform_decode_attention", "advance", "draw")}
    # Target: 2 layers once; draft model: 2 layers for the catch-up pass and twice more.
    assert count == {"uniform_decode_attention": 2 + 3 * 2, "advance": 1, "draw": 3}
    assert "state.seq_len" in traced.names
    assert "target.layers.0.qkv_weight" in traced.names


@pytest.mark.parametrize("mode", [Mode.FULL, Mode.PIECEWISE])
def test_replay_skips_the_dispatcher_unless_somebody_looks(mode):
    step = tiny_step("ngram")
    place(step, 0, PROMPT)
    step.state.set_rows([0])
    graphs = StepGraphs(step, all_keys((1,), (2,)), mode=mode)
    graphs.replay(1, 2)
    modules = [m for m in graphs[GraphKey(1, 2)].bound.modules() if isinstance(m, torch.fx.GraphModule)]
    targets = [node.target for m in modules for node in m.graph.nodes if node.op == "call_function"]
    assert implementation_on_cpu(uniform_decode_attention) in targets
    assert torch.Tensor.view in targets
    assert not [target for target in targets if str(target).startswith(("stepgraph.", "aten.view.", "aten.unbind."))]

    class Seen(TorchDispatchMode):
        ops = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ops += (str(func),)
            return func(*args, **(kwargs or {}))

    with Seen() as seen:
        graphs.replay(1, 2)
    assert seen.ops.count("stepgraph.uniform_decode_attention.default") == 2
    with use_implementation("none such"), pytest.raises(NoImplementation):
        graphs.replay(1, 2)


@pytest.mark.parametrize(
    ("batch", "k", "message"),
    [
        (0, 1, "batch is 0"),
        (5, 1, "batch is 5"),
        (-1, 1, "batch is -1"),
        (True, 1, "batch is True"),
        (1, -1, "k is -1"),
        (1, 1.0, "k is 1.0"),
        (1, 6, "k is 6"),
    ],
)
def test_batch_outside_the_state(batch, k, message):
    graphs = StepGraphs(tiny_step("ngram"), all_keys((4,), (1,)))
    with pytest.raises(ValueError, match=message):
        graphs.replay(batch, k)


def test_bad_arguments():
    with pytest.raises(ValueError, match="mode is 'HALF'; allowed are FULL, THREE_GRAPH, PIECEWISE, EAGER"):
        StepGraphs(tiny_step("ngram"), all_keys((4,), (1,)), mode="HALF")
    with pytest.raises(ValueError, match="k=6 was asked for; the state was made for k up to 5"):
        StepGraphs(tiny_step("ngram"), all_keys((4,), (6,)))
    with pytest.raises(ValueError, match="batch 8 was asked for; the state has 4 slots"):
        StepGraphs(tiny_step("ngram"), all_keys((8,), (1,)))


def test_destroy_and_capture_again():
    step = tiny_step("ngram")
    place(step, 0, PROMPT)
    graphs = StepGraphs(step, all_keys((1,), (2,)))
    graphs.capture()
    graphs.destroy()
    assert graphs.captured == frozenset()
    graphs.capture()
    step.state.set_rows([0])
    assert graphs.replay(1, 2) == GraphKey(1, 2)
