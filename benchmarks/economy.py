"""Graph economy: `python benchmarks/economy.py [--quick | --rerun]`."""

import sys

from stepgraph.capture.experiments.catalogue import script

if __name__ == "__main__":
    sys.exit(script("economy"))
