"""`stepgraph plan`: costs against numbers by hand, extrapolation against a full trace, and what a user sees."""

import json
from dataclasses import replace

import pytest
import torch

from stepgraph.capture.cli import main
from stepgraph.capture.keys import GraphKey
from stepgraph.capture.modes import Mode
from stepgraph.capture.phases import PHASES, phase_of
from stepgraph.capture.pieces import ATTENTION
from stepgraph.capture.plan import command as plan_command
from stepgraph.capture.plan.costs import cost_of, is_view
from stepgraph.capture.plan.gpus import GPUS, gpu_named
from stepgraph.capture.plan.launches import Launches
from stepgraph.capture.plan.overhead import Overhead
from stepgraph.capture.plan.plan import MODE_KEYS, _tally_of, expected_tokens, make_plan, rung_sets
from stepgraph.capture.plan.shapes import StepShapes
from stepgraph.capture.plan.tally import tally
from stepgraph.capture.policies import make_policy
from stepgraph.capture.trace import trace_step
from stepgraph.kernels.launch import record_launches
from stepgraph.kernels.rope_kv_triton import rope_kv_write_triton
from stepgraph.model.presets import PRESETS

CONTEXT = 32


def shapes_of(model="tiny-llama", drafter="ngram", *, k_max=2, max_batch=4, dtype=torch.bfloat16):
    return StepShapes(model, drafter, max_batch=max_batch, max_len=CONTEXT + k_max + 1, k_max=k_max, block_size=16, dtype=dtype)


def nodes_of(shapes, batch=2, k=2):
    with torch.no_grad():
        return trace_step(shapes.step(), batch, k, "cuda")


def only(traced, name, phase="verify"):
    return [node for node in traced.nodes if str(node.target) == f"stepgraph.{name}.default" and phase_of(node) == phase]


def test_cost_of_a_matrix_product():
    """qkv of tiny-llama: 6 rows of 64 times 128 × 64 weights, bfloat16."""
    cost = cost_of(only(nodes_of(shapes_of()), "linear")[0], CONTEXT)
    assert cost.flops == 2 * 6 * 64 * 128
    assert cost.nbytes == 2 * (6 * 64 + 128 * 64 + 6 * 128)
    assert cost.dtype is torch.bfloat16


def test_cost_of_attention_follows_the_context():
    """2 requests, 3 queries of 4 heads of 16; 2 KV heads: keys and values of the context are read once for all queries."""
    node = only(nodes_of(shapes_of()), "uniform_decode_attention")[0]
    for context in (32, 1000):
        cost = cost_of(node, context)
        assert cost.nbytes == 2 * (2 * 2 * 3 * 4 * 16 + 2 * 2 * context * 2 * 16)
        assert cost.flops == 4 * 2 * 3 * 4 * 16 * context


def test_cost_of_elementwise_ops_views_and_gathers():
    traced = nodes_of(shapes_of())
    gated = only(traced, "silu_mul")[0]
    assert cost_of(gated, CONTEXT).nbytes == 2 * 6 * (192 + 96)
    views = [node for node in traced.nodes if str(node.target).startswith(("aten.slice", "aten.view", "aten.select"))]
    assert views
    assert all(is_view(node) and cost_of(node, CONTEXT).nbytes == 0 for node in views)
    embedding = next(node for node in traced.nodes if str(node.target) == "aten.embedding.default")
    assert cost_of(embedding, CONTEXT).nbytes == 2 * (2 * 6 * 64) + 8 * 6  # rows in and out, ids; not the whole table
    assert not any(is_view(node) for node in traced.nodes if str(node.target).startswith(("aten.add.", "stepgraph.")))


def test_launches_of_an_op_are_those_its_launcher_makes():
    traced, launches = nodes_of(shapes_of()), Launches(90)
    assert [launches.count(node) for node in only(traced, "uniform_decode_attention")] == [2] * 3  # splits, merge
    assert launches.count(only(traced, "linear")[0]) == 1
    assert launches.count(next(node for node in traced.nodes if is_view(node))) == 0
    node = only(traced, "rope_kv_write")[0]
    arguments = [a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in node.args]
    arguments = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") if isinstance(a, torch.Tensor) else a
                 for a in arguments]  # fmt: skip
    with record_launches(launches.target) as specs:
        rope_kv_write_triton(*arguments)
    assert launches.count(node) == len(specs) == 1
    assert specs[0].constexprs == launches.specs["rope_kv_write_kernel"].constexprs


@pytest.mark.parametrize("drafter", ["none", "ngram", "early-exit:2", "draft-model:tiny-llama"])
def test_extrapolation_in_depth_equals_a_full_trace(drafter, monkeypatch):
    deep = replace(PRESETS["tiny-llama"], num_layers=7, layer_windows=(0,) * 7)
    monkeypatch.setitem(PRESETS, "deep", deep)
    monkeypatch.setitem(PRESETS, "tiny-llama", replace(PRESETS["tiny-llama"], num_layers=4, layer_windows=(0,) * 4))
    drafter = "early-exit:5" if drafter.startswith("early") else drafter
    shapes, gpu, launches = shapes_of("deep", drafter), gpu_named("h100"), Launches(90)
    for k in (0,) if drafter == "none" else (0, 2):
        key = GraphKey(3, k)
        found = _tally_of(shapes, key, CONTEXT, gpu, launches)
        whole = tally(trace_step(shapes.step(), 3, k, "cuda"), CONTEXT, gpu, launches)
        assert found.sums.keys() == whole.sums.keys()
        for name, value in whole.sums.items():
            assert found.sums[name] == pytest.approx(value, rel=1e-9), name
        assert found.peak_bytes == whole.peak_bytes


def plan_of(shapes=None, k=2, overhead=None, acceptance=(0.5,)):
    overhead = overhead or Overhead()
    policy = make_policy(k)
    return make_plan(
        shapes or shapes_of(k_max=k), policy, gpu_named("h200"), context=CONTEXT, acceptance=acceptance, overhead=overhead
    )[0]


def test_phases_sum_to_the_step_and_modes_are_ordered():
    plan = plan_of(shapes_of(drafter="early-exit:1"), overhead=Overhead(0.0, 8.0, 6.0))
    for key in plan.keys:
        assert sum(key.phases.values()) == pytest.approx(key.time_us)
        assert key.phases["draft"] > 0
        assert key.phases["verify"] > key.phases["accept"] > 0
        modes = [key.modes[MODE_KEYS[mode]] for mode in (Mode.FULL, Mode.THREE_GRAPH, Mode.PIECEWISE, Mode.EAGER)]
        assert modes == sorted(modes)
        assert modes[0] < modes[1] < modes[2] < modes[3]  # the host decides on a model this small
        assert key.tpot_us == pytest.approx(modes[0] / 1.75)


def test_host_time_is_the_launches_of_each_mode():
    shapes, launches = shapes_of(), Launches(90)
    traced = nodes_of(shapes)
    sums = tally(traced, CONTEXT, gpu_named("h200"), launches).sums
    attention = sum(node.target is ATTENTION for node in traced.nodes)
    tail = sum(launches.count(node) for node in traced.nodes if phase_of(node) in ("accept", "advance"))
    assert (sums["graphs/FULL"], sums["eager/FULL"]) == (1, 0)
    assert sums["eager/EAGER"] == sums["launches"]
    assert sums["eager/PIECEWISE"] == 2 * attention + tail
    assert sums["graphs/PIECEWISE"] == attention + 1
    assert (sums["graphs/THREE_GRAPH"], sums["eager/THREE_GRAPH"]) == (2, tail)


def test_eagle3_observes():
    plan = plan_of(shapes_of("tiny-llama", "eagle3:random"))
    assert all(key.phases["observe"] > key.phases["accept"] for key in plan.keys)
    with pytest.raises(ValueError, match="eagle3:somewhere"):
        shapes_of("tiny-llama", "eagle3:somewhere")


def test_memory_grows_with_batch_and_holds_the_logits():
    plan = plan_of()
    assert plan.pool_bytes >= 4 * 3 * 256 * 2  # the logits of the largest key
    assert plan.kv_bytes == 2 * 3 * (4 * 3 * 16) * 2 * 16 * 2
    assert plan.weight_bytes > 0


def test_expected_tokens():
    assert expected_tokens([0.8], 0) == 1
    assert expected_tokens([0.8], 3) == pytest.approx((1 - 0.8**4) / 0.2)
    assert expected_tokens([0.9, 0.5], 3) == pytest.approx(1 + 0.9 + 0.45 + 0.225)


@pytest.mark.parametrize("model", PRESETS)
def test_every_preset_can_be_planned(model):
    plan = plan_of(shapes_of(model, k_max=1, max_batch=1), k=1)
    assert len(plan.keys) == 1
    config = PRESETS[model]
    # Each layer: qkv, rope, attention (2 or more), o, two norms, gate-up, silu, down.
    assert plan.keys[0].launches > 9 * config.num_layers
    assert plan.keys[0].bytes > plan.weight_bytes * 0.2


@pytest.mark.parametrize("gpu", GPUS)
def test_gpus(gpu):
    found = gpu_named(gpu)
    assert found.flops_per_s(torch.bfloat16) > 4 * found.flops_per_s(torch.float32)
    assert found.source


TINY = ["plan", "--model", "tiny-llama", "--max-batch", "4", "--context", "64"]
PUBLISHED = "[[1,16,5],[17,32,4],[33,64,3],[65,128,1],[129,512,0]]"


def test_json_has_the_documented_keys(capsys):
    assert main([*TINY, "--schedule", "[[1,2,2],[3,4,0]]", "--json", "-"]) == 0
    printed = capsys.readouterr()
    plan = json.loads(printed.out.splitlines()[-1])
    assert {"graphs", "misses", "padding_mean", "padding_worst", "pool_bytes", "keys", "kernels", "assumptions"} <= set(plan)
    assert (plan["graphs"], plan["misses"], plan["padding_mean"]) == (4, 0, 0)
    assert set(plan["keys"][0]) == {
        "batch", "k", "nodes", "launches", "bytes", "flops", "time_us", "phases", "modes", "tokens", "tpot_us",
    }  # fmt: skip
    assert set(plan["keys"][0]["phases"]) == set(PHASES)
    assert set(plan["keys"][0]["modes"]) == {"full_us", "three_graph_us", "piecewise_us", "eager_us"}
    assert {"name", "arch", "registers", "shared_bytes", "spills"} == set(plan["kernels"][0])
    assert plan["assumptions"]["overhead_us"] == {"node_us": 1.0, "launch_us": 8.0, "eager_op_us": 6.0}
    assert "assumed:" in printed.err


def test_published_schedule_needs_few_graphs_and_little_padding():
    """≤ 40 graphs, no misses, mean padding ≤ 5 %, worst ≤ 25 %; other buckets have more of one or of the other."""
    sets = rung_sets(make_policy(schedule=PUBLISHED, hold_steps=0), 256)
    graphs, mean, worst = sets["default"]
    assert graphs == 36
    assert mean <= 0.05
    assert worst <= 0.25
    assert sets["powers of two"][0] < graphs < sets["every size"][0] == 256
    assert sets["powers of two"][1] > mean > sets["every size"][1] == 0


def test_gate_file_and_plot(tmp_path, capsys):
    rows = [{"kernel": "rms_norm_kernel", "arch": "sm_90", "registers": n, "shared": 0, "spill": 0} for n in (20, 30)]
    (tmp_path / "gate.json").write_text(json.dumps(rows))
    assert main([*TINY, "--gate", str(tmp_path / "gate.json"), "--json", str(tmp_path / "plan.json")]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["kernels"] == [{"name": "rms_norm_kernel", "arch": "sm_90", "registers": 30, "shared_bytes": 0, "spills": 0}]
    capsys.readouterr()
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert main([*TINY, "--plot", str(tmp_path / "plan.svg")]) == 2
        assert "--plot needs matplotlib" in capsys.readouterr().err
    else:
        assert main([*TINY, "--plot", str(tmp_path / "plan.svg")]) == 0
        assert "<svg" in (tmp_path / "plan.svg").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "tpu"], "gpu is 'tpu'; allowed are a100, h100, h200, b200"),
        (["--model", "nothing"], "'nothing' has no shapes here"),
        (["--drafter", "early-exit:9"], "drafter is 'early-exit:9'; tiny-llama has 3 layers"),
        (["--drafter", "none", "--k", "2"], "only k=0 is possible"),
        (["--context", "100000"], "context is"),
        (["--context", "0"], "--context is 0"),
        (["--hold-steps", "-1"], "--hold-steps is -1"),
        (["--max-batch", "0"], "--max-batch is 0"),
        (["--acceptance", "0.5,x"], "--acceptance is '0.5,x'"),
        (["--acceptance", "1.5"], "an entry of --acceptance is 1.5"),
        (["--rungs", "4,2"], "rungs must ascend"),
        (["--node-us", "-1"], "--node-us is -1"),
        (["--launch-us", "nan"], "--launch-us is nan"),
        (["--k", "99"], "k"),
        (["--gate", "missing.json"], "--gate is 'missing.json'"),
        (["--json", "/nowhere/plan.json"], "--json is '/nowhere/plan.json'"),
    ],
)
def test_bad_input_is_one_sentence(options, message, capsys):
    assert main([*TINY, *options]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("stepgraph: error: ")
    assert message in error


@pytest.mark.parametrize("options", [["--json", "/nowhere/plan.json"], ["--plot", "plan.gif"], ["--plot", "/nowhere/plan.svg"]])
def test_files_that_cannot_be_written_are_found_before_the_work(options, monkeypatch, capsys):
    monkeypatch.setattr(plan_command, "make_plan", None)  # a call would end with another message
    assert main([*TINY, *options]) == 2
    assert f"{options[0]} " in capsys.readouterr().err


def test_a_plan_takes_no_float64(capsys):
    """No kernel is written for it, so there would be nothing to count."""
    with pytest.raises(SystemExit, match="2"):
        main([*TINY, "--dtype", "float64"])
    assert "argument --dtype: invalid choice: 'float64'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA is told")
def test_measure_needs_a_gpu(capsys):
    assert main([*TINY, "--measure"]) == 2
    assert "has no CUDA" in capsys.readouterr().err


@pytest.mark.gpu
def test_measured_beside_predicted(capsys):
    assert main([*TINY, "--measure", "--json", "-"]) == 0
    plan = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {(row["batch"], row["k"]) for row in plan["measured"]} == {(key["batch"], key["k"]) for key in plan["keys"]}
    assert all(row["full_us"] > 0 for row in plan["measured"])
