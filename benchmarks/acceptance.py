"""Acceptance by drafter, k, temperature, verification and category: `python benchmarks/acceptance.py [--quick | --rerun]`."""

import sys

from stepgraph.capture.experiments.acceptance import measure, table
from stepgraph.capture.experiments.results import Experiment, main

EXPERIMENT = Experiment("acceptance", "Acceptance length", measure, table)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, "benchmarks/acceptance.py"))
