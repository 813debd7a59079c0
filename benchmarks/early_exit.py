"""Acceptance where the target's first layers draft: `python benchmarks/early_exit.py [--quick | --rerun]`."""

import sys

from stepgraph.capture.experiments.catalogue import script

if __name__ == "__main__":
    sys.exit(script("early_exit"))
