"""`make gpu`: every part runs at tiny sizes on this machine, from a checkout that is not installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stepgraph.capture.experiments.gpu_day import captures, checks, command, launches
from stepgraph.capture.experiments.results import load, save
from stepgraph.kernels.environment import device_slug, environment

CHECKOUT = Path(__file__).parents[2]


def test_a_copy_of_the_checkout_runs_its_own_code(tmp_path):
    """The copy, and not an installed package, has to run; its results are its own."""
    copy = tmp_path / "copy"
    for floor in ("kernels", "model", "capture", "benchmarks"):
        shutil.copytree(CHECKOUT / floor, copy / floor, ignore=shutil.ignore_patterns("__pycache__", "results"))
    marked = copy / "capture" / "experiments" / "gpu_day" / "launches.py"
    marked.write_text(marked.read_text().replace('"a node of a graph"', '"a node of a copied graph"'))
    arguments = ["--dry", "--part", "3", "--inside", "--results", str(tmp_path / "kept")]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = [sys.executable, "-P", str(copy / "benchmarks" / "gpu.py"), *arguments]
    done = subprocess.run(script, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = load(tmp_path / "kept" / device_slug() / "gpu-launches.json")["rows"]
    assert any(row["what"] == "a node of a copied graph" for row in rows)


@pytest.mark.parametrize(
    ("measure", "names"),
    [
        (launches.measure, {"what", "x", "unit", "p20", "p50", "p80"}),
        (captures.measure, {"model", "what"}),
    ],
)
def test_each_part_at_tiny_sizes(measure, names):
    rows = list(measure(True, 0))
    assert rows
    assert all(names <= set(row) for row in rows if row.get("status", "ok") == "ok")


def test_the_gpu_tests_are_found_and_counted(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    (row,) = checks.measure(True, 0)
    assert row["status"] == "ok", row["output"]
    assert row["passed" if torch.cuda.is_available() else "skipped"] > 10


def test_a_failing_part_is_told_and_the_others_run(tmp_path, monkeypatch, capfd):
    class Broken:
        TimeoutExpired = subprocess.TimeoutExpired

        @staticmethod
        def run(*arguments, **options):
            return subprocess.CompletedProcess(arguments, 7)

    monkeypatch.setattr(command, "subprocess", Broken)
    assert command.main(["--dry", "--results", str(tmp_path)]) == 1
    assert capfd.readouterr().out.count("stopped with status 7") == len(command.PARTS)


def test_only_what_is_complete_for_this_revision_is_kept(tmp_path):
    path = tmp_path / "part.json"
    assert not command._complete(path)
    content = {
        "schema": "stepgraph.results/1", "experiment": "x", "command": "", "seed": 0, "env": environment(), "complete": True,
        "note": "", "rows": [],
    }  # fmt: skip
    content["env"]["git"] = {"revision": "another", "dirty": False}
    save(path, content)
    assert not command._complete(path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="describes a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert command.main([]) == 2
    assert "make gpu DRY=1" in capsys.readouterr().err
    assert command.main(["--dry", "--part", "9"]) == 2
    assert "--part is 9; there are parts 1 to 6" in capsys.readouterr().err
