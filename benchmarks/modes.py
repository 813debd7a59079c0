"""FULL, THREE_GRAPH, PIECEWISE, EAGER: `python benchmarks/modes.py [--quick | --rerun]`."""

import sys

from stepgraph.capture.experiments.catalogue import script

if __name__ == "__main__":
    sys.exit(script("modes"))
