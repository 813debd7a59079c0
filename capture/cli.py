"""The `stepgraph` command. Bad input ends with one sentence on stderr and a non-zero exit, never with a traceback."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Sequence

from stepgraph.capture import generate
from stepgraph.capture.console import INTERRUPTED, USAGE_ERROR


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one line."""

    def error(self, message: str) -> None:
        self.exit(USAGE_ERROR, f"stepgraph: error: {message}\n")


def _show_warning(message, category, filename, lineno, file=None, line=None) -> None:
    print(f"stepgraph: warning: {message}", file=sys.stderr)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="stepgraph", description="Whole speculative-decoding steps, one graph for each (batch, k).")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    command = commands.add_parser("generate", help="generate text", description=generate.__doc__)
    generate.add_arguments(command)
    command.set_defaults(run=generate.run)
    return parser


def run_command(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; errors become one sentence. Returns the exit status."""
    warnings.showwarning = _show_warning
    try:
        return run(args)
    except KeyboardInterrupt:
        print("stepgraph: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away; there is nobody left to tell. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        print(f"stepgraph: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR


def main(argv: Sequence[str] | None = None) -> int:
    """The `stepgraph` command line; returns the exit status."""
    args = build_parser().parse_args(argv)
    return run_command(args.run, args)


if __name__ == "__main__":
    sys.exit(main())
