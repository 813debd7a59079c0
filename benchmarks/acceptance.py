"""Acceptance by drafter, k, temperature, verification and category: `python benchmarks/acceptance.py [--quick | --rerun]`."""

import sys

from stepgraph.capture.experiments.catalogue import script

if __name__ == "__main__":
    sys.exit(script("acceptance"))
