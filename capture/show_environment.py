"""What results measured here would carry as their environment, as JSON."""

import argparse
import json

from stepgraph.kernels.environment import environment


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> int:
    print(json.dumps(environment(), indent=1))
    return 0
