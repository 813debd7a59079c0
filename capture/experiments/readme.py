"""The results section of the README, from the committed JSON: `python -m stepgraph.capture.experiments.readme [--check]`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from stepgraph.capture.cli import guarded
from stepgraph.capture.experiments.catalogue import EXPERIMENTS
from stepgraph.capture.experiments.results import FOLDER, Table, measured

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- results: written by `make readme-tables` -->\n", "<!-- end of results -->\n"


def results_table(folder: Path) -> str:
    """A line for each headline of each device, with what measured it."""
    lines = []
    for name, experiment in EXPERIMENTS.items():
        for device, content in measured(experiment, folder).items():
            env = content["env"]
            chip = f"{device}, {env['cpu_cores']} cores ({env['cpu_capability']})" if env["gpu"] is None else device
            hardware = f"{chip}, {env['date_utc'][:10]}"
            command = f"`python benchmarks/{name}.py --rerun`"
            lines += [[figure, value, hardware, command] for figure, value in experiment.headlines(content["rows"])]
    return Table(["figure", "value", "measured on", "by"], lines).markdown() + "\n"


def with_results(text: str, folder: Path) -> str:
    """The README's text with its results section written anew.

    Raises:
        ValueError: the two markers are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"README.md needs the lines {BEGIN.strip()!r} and {END.strip()!r}, once each")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{results_table(folder)}\n{END}{rest.partition(END)[2]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; with `--check`, 1 where the section is not what the JSON says."""
    parser = argparse.ArgumentParser(prog="python -m stepgraph.capture.experiments.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    args = parser.parse_args(argv)

    def run() -> int:
        text = README.read_text(encoding="utf-8")
        written = with_results(text, FOLDER)
        if args.check and written != text:
            print("README.md has other results than benchmarks/results; run make readme-tables", file=sys.stderr)
            return 1
        if written != text:
            README.write_text(written, encoding="utf-8")
        return 0

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
