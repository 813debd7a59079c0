"""The cost table: between and beyond what was measured, and the files it is read from."""

import json
from pathlib import Path

import pytest
from policy_cases import table

from stepgraph.capture.cli import main
from stepgraph.capture.cost_table import CostTable


def test_cost_between_and_beyond_what_was_measured():
    rows = [{"batch": n, "k": 1, "context": c, "step_ms": n + c / 100} for n in (1, 5) for c in (100, 300)]
    cost = CostTable([*rows, {"batch": 2, "k": 0, "context": 100, "step_ms": 7.0}])
    assert cost.step_ms(3, 1, 200) == pytest.approx(5.0)
    assert cost.step_ms(9, 1, 500) == pytest.approx(14.0)
    assert cost.step_ms(1, 1, 5) == pytest.approx(2.0)
    assert cost.step_ms(4, 1) == pytest.approx(5.0)
    assert cost.step_ms(40, 0, 900) == 7.0
    falling = CostTable({"batch": n, "k": 0, "context": 0, "step_ms": 10 - n} for n in (1, 2))
    assert falling.step_ms(100, 0) == 8


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "has no rows"),
        ({"batch": 1}, "the cost table is .*; it must be a list of rows"),
        ([{"batch": 1, "k": 0, "context": 0, "step_ms": 10**400}], "step_ms in row 0 of the cost table is 1000"),
        ([{"batch": 10**400, "k": 0, "context": 0, "step_ms": 1}], "batch in row 0 of the cost table is 1000"),
        ([3], "row 0 of the cost table is 3; it must have batch, k, context, step_ms"),
        ([{"batch": 0, "k": 0, "context": 0, "step_ms": 1}], "batch in row 0"),
        ([{"batch": 1, "k": 0, "context": 0, "step_ms": 0}], "step_ms in row 0 of the cost table is 0"),
        ([{"batch": 1, "k": 0, "context": 0, "step_ms": float("nan")}], "must be a positive number"),
        ([{"batch": 1, "k": 0, "context": 0, "step_ms": 1}] * 2, "row 1 of the cost table is the second"),
    ],
)
def test_cost_rows_are_checked(rows, reason):
    with pytest.raises(ValueError, match=reason):
        CostTable(rows)


def test_cost_of_an_unmeasured_k():
    with pytest.raises(ValueError, match="k is 9; the cost table has 0, 1, 2, 3, 4, 5"):
        table().step_ms(1, 9)


@pytest.mark.parametrize("content", ["", "{}", '{"schema": "stepgraph.profile/1", "rows": {}}'])
def test_damaged_profiles_are_named(tmp_path, content):
    (tmp_path / "p.json").write_text(content)
    with pytest.raises(ValueError, match=r"profile p\.json"):
        CostTable.load(tmp_path / "p.json")


def test_plans_of_one_k_each_make_one_table(tmp_path, capsys):
    paths = []
    for k in (0, 2):
        paths.append(str(tmp_path / f"plan{k}.json"))
        plan = ["plan", "--model", "tiny-llama", "--max-batch", "2", "--k", str(k), "--context", "100", "--json", paths[-1]]
        assert main(plan) == 0
    cost = CostTable.load(*paths)
    keys = [key for path in paths for key in json.loads(Path(path).read_text())["keys"]]
    for key in keys:
        assert cost.step_ms(key["batch"], key["k"], 100) == pytest.approx(key["modes"]["full_us"] / 1e3)
    assert main(["simulate", "--cost", paths[0], "--cost", paths[1], "--steps", "20"]) == 0
    with pytest.raises(ValueError, match=r"plan0\.json: row 2 of the cost table is the second"):
        CostTable.load(paths[0], paths[0])
    Path(paths[0]).write_text('{"keys": [{"batch": 1}], "assumptions": {"context_tokens": 1}}')
    with pytest.raises(ValueError, match=r"plan plan0\.json has no 'k' for a key"):
        CostTable.load(paths[0])
