"""Losslessness, laws and greedy text: `python benchmarks/lossless.py [--quick | --rerun]`."""

import sys

from stepgraph.capture.experiments.catalogue import script

if __name__ == "__main__":
    sys.exit(script("lossless"))
