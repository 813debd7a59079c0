"""`python benchmarks/gpu.py`, as `make gpu` runs it: parts one after another, each in a process of its own with a time limit.

A part's rows are kept as they come in `results/<device>/`. A part that is complete for this revision is not run
again unless it is asked for by number. `--dry` runs every part at tiny sizes, on a CPU too, and keeps its rows elsewhere.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from stepgraph.capture.cli import guarded
from stepgraph.capture.experiments.catalogue import EXPERIMENTS
from stepgraph.capture.experiments.gpu_day import captures, checks, launches
from stepgraph.capture.experiments.results import FOLDER, Experiment, Table, load, measure
from stepgraph.kernels.environment import device_slug, environment

LIMIT_S = 480  # of a part


def _plain_table(rows: list[dict]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Table(names, [[str(row.get(name, "")) for name in names] for row in rows])


# Those with a script of their own under benchmarks/ keep their rows in that script's file.
PARTS = (
    Experiment("gpu-tests", "tests marked gpu", checks.measure, _plain_table),
    EXPERIMENTS["kernels"],
    Experiment("gpu-launches", "graph launches, nodes, gaps, SWITCH", launches.measure, _plain_table),
    EXPERIMENTS["modes"],
    Experiment("gpu-captures", "what captures take", captures.measure, _plain_table),
    EXPERIMENTS["dynamic"],
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 when every part that was to run is complete."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.py", description=__doc__.partition("\n")[0])
    parser.add_argument("--part", type=int, help=f"only this one, 1 to {len(PARTS)}, again if need be")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on a CPU too; rows are not kept under results/")
    parser.add_argument("--results", type=Path, default=FOLDER)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the part's own process
    args = parser.parse_args(argv)
    return guarded(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.part is not None and not 1 <= args.part <= len(PARTS):
        raise ValueError(f"--part is {args.part}; there are parts 1 to {len(PARTS)}")
    slug = device_slug()
    if not args.dry and environment()["gpu"] is None:
        raise ValueError("there is no CUDA device here; --dry (make gpu DRY=1) runs every part without one")
    if args.inside:
        return _inside(args, slug)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if args.dry else args.results
        numbers = range(1, len(PARTS) + 1) if args.part is None else [args.part]
        statuses = [_outside(number, folder, slug, args) for number in numbers]
    return int(any(statuses))


def _outside(number: int, folder: Path, slug: str, args: argparse.Namespace) -> int:
    part = PARTS[number - 1]
    path = folder / slug / f"{part.name}.json"
    if args.part is None and _complete(path):
        print(f"part {number}, {part.title}: complete for this revision")
        return 0
    start_s = time.perf_counter()
    command = [sys.executable, "-m", "stepgraph.capture.experiments.gpu_day.command", "--inside", "--part", str(number)]
    command += ["--results", str(folder), *(["--dry"] if args.dry else [])]
    try:
        status = subprocess.run(command, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        status = 124
    rows = load(path)["rows"] if path.exists() else []
    done = "done" if status == 0 else f"stopped with status {status}"
    print(f"part {number}, {part.title}: {done}, {len(rows)} rows, {time.perf_counter() - start_s:.0f} s", flush=True)
    for row in rows:
        if str(row.get("status", "ok")) not in ("ok", "absent"):
            print(json.dumps(row)[:3000], flush=True)
    return status


def _inside(args: argparse.Namespace, slug: str) -> int:
    part = PARTS[args.part - 1]
    command = f"python benchmarks/gpu.py --part {args.part}" + (" --dry" if args.dry else "")
    measure(part, args.dry, 0, command, args.results / slug / f"{part.name}.json")
    return 0


def _complete(path: Path) -> bool:
    """Whether the part has been run to its end with this code."""
    if not path.exists():
        return False
    kept, git = load(path), environment()["git"]
    return kept["complete"] and git is not None and not git["dirty"] and kept["env"]["git"] == git


if __name__ == "__main__":
    sys.exit(main())
