"""Results files: `results/<device>/<experiment>.json`, and the command line of every script that measures one.

    {"schema": "stepgraph.results/1", "experiment", "command", "seed", "env", "complete", "note", "rows"}

A script draws its table from the committed files of all devices; `--rerun` measures here and overwrites this device's file,
`--quick` measures a small part and only shows it.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm.auto import tqdm

from stepgraph.capture.cli import guarded
from stepgraph.kernels.environment import device_slug, environment
from stepgraph.kernels.output import write_whole

SCHEMA = "stepgraph.results/1"
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SEED = 0
FIELDS = ("schema", "experiment", "command", "seed", "env", "complete", "note", "rows")


@dataclass(frozen=True)
class Table:
    """A table as texts; `note` is the sentence that says what to see."""

    header: list[str]
    lines: list[list[str]]
    note: str = ""

    def markdown(self) -> str:
        """GitHub's table, numbers to the right."""
        numeric = [all(line[column][:1].isdigit() for line in self.lines) for column in range(len(self.header))]
        rule = ["---:" if right else "---" for right in numeric]
        rows = [" | ".join(cells) for cells in (self.header, rule, *self.lines)]
        return "\n".join(f"| {row} |" for row in rows) + (f"\n\n{self.note}" if self.note else "")


@dataclass(frozen=True)
class Experiment:
    """One table or figure.

    Attributes:
        name: of its results file.
        title: what it shows.
        measure: (quick, seed) -> rows, one at a time; they are kept as they come.
        table: rows of one device -> what is drawn.
        headlines: rows of one device -> (figure, value) of what the README says; none by default.
    """

    name: str
    title: str
    measure: Callable[[bool, int], Iterator[dict]]
    table: Callable[[list[dict]], Table]
    headlines: Callable[[list[dict]], list[tuple[str, str]]] = lambda rows: []


def save(path: Path, content: dict) -> None:
    """Write a results file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {field: content[field] for field in FIELDS if field != "rows"}
    # A row on a line: a re-measured row is a line of the difference.
    rows = ",\n".join(json.dumps(row) for row in content["rows"])
    write_whole(path, json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{rows}\n]}}\n')


def load(path: Path) -> dict:
    """Read a results file.

    Raises:
        ValueError: it cannot be read or is not one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"results file {path.name} cannot be read: {error}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA or any(field not in content for field in FIELDS):
        raise ValueError(f"results file {path.name} is not of schema {SCHEMA} with {', '.join(FIELDS)}")
    return content


def measured(experiment: Experiment, folder: Path) -> dict[str, dict]:
    """Committed results by device."""
    return {path.parent.name: load(path) for path in sorted(folder.glob(f"*/{experiment.name}.json"))}


def measure(experiment: Experiment, quick: bool, seed: int, command: str, path: Path | None, note: str = "") -> dict:
    """Run the experiment; with a `path`, what there is so far is kept there after each row."""
    content = {
        "schema": SCHEMA, "experiment": experiment.name, "command": command, "seed": seed, "env": environment(),
        "complete": False, "note": note, "rows": [],
    }  # fmt: skip
    with tqdm(desc=experiment.name, unit="row") as bar:
        for row in experiment.measure(quick, seed):
            content["rows"].append(row)
            bar.update()
            if path is not None:
                save(path, content)
    content["complete"] = True
    if path is not None:
        save(path, content)
    return content


def main(experiment: Experiment, script: str, argv: Sequence[str] | None = None) -> int:
    """The command line of a script; returns its exit status."""
    parser = argparse.ArgumentParser(prog=script, description=experiment.title)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="measure a small part here, in under a minute, and keep nothing")
    how.add_argument("--rerun", action="store_true", help="measure here and overwrite this device's results")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--note", default="", help="kept with the results, e.g. what else the machine was doing")
    parser.add_argument("--results", type=Path, default=FOLDER, metavar="FOLDER", help="where results are")
    args = parser.parse_args(argv)
    command = f"python {script} {shlex.join(sys.argv[1:] if argv is None else argv)}".strip()

    def run() -> int:
        if args.quick or args.rerun:
            path = args.results / device_slug() / f"{experiment.name}.json" if args.rerun else None
            found = {device_slug(): measure(experiment, args.quick, args.seed, command, path, args.note)}
        else:
            found = measured(experiment, args.results)
        if not found:
            print(f"no results of {experiment.name} are kept; --rerun measures them here", file=sys.stderr)
            return 1
        for device, content in found.items():
            when = content["env"]["date_utc"][:10]
            part = "" if content["complete"] else " (interrupted; a part)"
            print(f"{experiment.title}: {device}, {when}{part}\n")
            print(experiment.table(content["rows"]).markdown())
            print(f"\n{content['command']}" + (f"\n{content['note']}" if content["note"] else "") + "\n")
        return 0

    return guarded(run)
