"""Perplexity by dtype and weights: `python benchmarks/precision.py [--quick | --rerun]`."""

import sys

from stepgraph.capture.experiments.catalogue import script

if __name__ == "__main__":
    sys.exit(script("precision"))
