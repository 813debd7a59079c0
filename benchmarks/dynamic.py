"""Dynamic schedule against fixed k: `python benchmarks/dynamic.py [--quick | --rerun]`."""

import sys

from stepgraph.capture.experiments.catalogue import script

if __name__ == "__main__":
    sys.exit(script("dynamic"))
