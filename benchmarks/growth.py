"""Time of a step by context, batch and k, each against its bound: `python benchmarks/growth.py [--quick | --rerun]`."""

import sys

from stepgraph.capture.experiments.catalogue import script

if __name__ == "__main__":
    sys.exit(script("growth"))
