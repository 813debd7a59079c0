"""Greedy speed beside other programs, same weights and prompts: `python benchmarks/peers.py [--quick | --rerun]`."""

import sys

from stepgraph.capture.experiments.peers import measure, table
from stepgraph.capture.experiments.results import Experiment, main

EXPERIMENT = Experiment("peers", "Greedy decoding, batch 1", measure, table)

if __name__ == "__main__":
    sys.exit(main(EXPERIMENT, "benchmarks/peers.py"))
