"""Greedy speed beside other programs, same weights and prompts: `python benchmarks/peers.py [--quick | --rerun]`."""

import sys

from stepgraph.capture.experiments.catalogue import script

if __name__ == "__main__":
    sys.exit(script("peers"))
