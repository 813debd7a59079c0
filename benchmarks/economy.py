"""Graph economy: `python benchmarks/economy.py [--quick | --rerun]`."""

import sys

from stepgraph.capture.experiments.economy import measure, table
from stepgraph.capture.experiments.results import Experiment, main

EXPERIMENT = Experiment("economy", "Graph economy", measure, table)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, "benchmarks/economy.py"))
