"""Regret of policies for k: `python benchmarks/regret.py [--quick | --rerun]`."""

import sys

from stepgraph.capture.experiments.regret import measure, table
from stepgraph.capture.experiments.results import Experiment, main

EXPERIMENT = Experiment("regret", "Regret of policies for k", measure, table)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, "benchmarks/regret.py"))
