"""The microbenchmarks and the tuner where there is no GPU: references, marked as such, and the logic around the timing."""

import json

import pytest
import torch

from stepgraph.kernels import bench, bench_tail, tables, tune
from stepgraph.kernels.baselines import sdpa_gathered
from stepgraph.kernels.bench_cases import CASES
from stepgraph.kernels.shapes import MODEL_SHAPES, shape_named
from stepgraph.kernels.testing import assert_kernel_close, paged_case
from stepgraph.model.presets import PRESETS

FIELDS = {
    "kernel",
    "provider",
    "x",
    "unit",
    "p20",
    "p50",
    "p80",
    "l2",
    "gb_per_s",
    "share_of_copy",
    "device",
    "torch",
    "triton",
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
@pytest.mark.parametrize("op", [*CASES, "tail"])
def test_rows_on_the_cpu(op, capsys):
    assert bench.main([op, "--json", "--small"]) == 0
    captured = capsys.readouterr()
    rows = json.loads(captured.out)
    assert "references on the CPU" in captured.err
    measured = [row for row in rows if row["status"] == "ok"]
    assert {row["provider"] for row in rows} >= {"reference"}
    assert "triton" not in {row["provider"] for row in rows}
    assert all(set(row) >= FIELDS and 0 < row["p20"] <= row["p50"] <= row["p80"] for row in measured)
    assert all(row["device"].startswith("cpu") for row in rows)


@pytest.mark.parametrize(("k", "launches"), [(1, 6), (3, 7)])
def test_launches_of_a_tail(k, launches):
    """Transforms, laws of all rows, (block residuals,) acceptance, race, emission, log-probabilities."""
    assert bench_tail.launches(k, 32_000) == launches


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_a_tail_that_decides_wrongly_gets_no_time(monkeypatch):
    def wrong(which):
        return lambda t: (torch.full((1, 4), 0 if which == "reference" else 1), torch.zeros(1))

    monkeypatch.setattr(bench_tail, "tail_of", wrong)
    monkeypatch.setattr(bench_tail, "launches", lambda *_: 7)
    rows = list(bench_tail.rows(torch.device("cpu"), small=True))
    assert {row["status"][:5] for row in rows if row["provider"] == "cpu"} == {"wrong"}
    assert all("p50" not in row for row in rows if row["provider"] == "cpu")


def test_sdpa_baseline_is_right():
    case = paged_case([20, 33], query_len=3, head_dim=16, window=9)
    case.k_cache.nan_to_num_(), case.v_cache.nan_to_num_()
    from stepgraph.kernels.attention import uniform_decode_attention_reference

    assert_kernel_close(sdpa_gathered(*case.args), uniform_decode_attention_reference, *case.args, band=8)


def test_wrong_results_are_not_close():
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="error"):
        assert_kernel_close(x + 1e-3, lambda x: x, x)
    with pytest.raises(AssertionError, match="finite"):
        assert_kernel_close(x * torch.nan, lambda x: x, x)


def test_tuner_takes_the_fastest_candidate_that_runs():
    def run(candidate):
        if candidate == {"a": 1, "b": 2}:
            raise AssertionError("wrong")
        return [10.0 / candidate["a"], 10.0 * candidate["b"]]

    assert tune.best_candidate({"a": (1, 2), "b": (1, 2)}, run, lambda _: None)[0] == {"a": 2, "b": 1}


def test_tuned_entry_replaces_its_predecessor_and_may_not_break_bits():
    content = tables.load("attention")
    match = {"arch": 90, "group": 4, "head_dim": 128, "dtype": "bfloat16"}
    for tile in (32, 128):
        content = tune.updated_table("attention", content, match, {"tile_kv": tile}, {"method": "timed"})
    assert [entry["config"] for entry in content["entries"] if entry["match"] == match] == [{"tile_kv": 128}]
    with pytest.raises(ValueError, match="tile_kv"):
        tune.updated_table("attention", content, {"query_len": 1}, {"tile_kv": 32}, {})


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_tuner_needs_a_gpu(capsys):
    assert tune.main(["attention"]) == 2
    assert "CUDA" in capsys.readouterr().err


def test_tuner_names_an_unknown_model_on_any_machine():
    with pytest.raises(ValueError, match=r"no model shape 'nothing'; there are llama-3\.1-8b, "):
        tune.main(["attention", "--model", "nothing"])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_shape(name):
    config, shape = PRESETS[name], shape_named(name)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (config.num_heads, config.num_kv_heads, config.head_dim)
    assert (shape.hidden, shape.intermediate, shape.vocab) == (config.hidden_size, config.intermediate_size, config.vocab_size)
    assert (shape.qk_norm, shape.qkv_bias) == (config.qk_norm, config.qkv_bias)


def test_a_file_that_cannot_be_written_is_found_before_the_work(monkeypatch, capsys):
    monkeypatch.setattr(bench, "rows_of", None)
    with pytest.raises(SystemExit, match="2"):
        bench.main(["silu", "--json", "/nowhere/rows.json"])
    assert "--json is '/nowhere/rows.json', which cannot be written: No such file or directory" in capsys.readouterr().err


def test_shape_names_are_unique():
    assert len({shape.name for shape in MODEL_SHAPES}) == len(MODEL_SHAPES)
    with pytest.raises(ValueError, match="llama"):
        shape_named("nothing")
