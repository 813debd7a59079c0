"""The `stepgraph` command. Bad input ends with one sentence on stderr and a non-zero exit, never with a traceback."""

import argparse
import sys
from collections.abc import Sequence

from stepgraph.kernels.command import USAGE_ERROR, guarded


class Parser(argparse.ArgumentParser):
    """argparse that says what is wrong in one line."""

    def error(self, message: str) -> None:
        self.exit(USAGE_ERROR, f"stepgraph: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    # Imported here, under `guarded`: loading torch takes seconds, and an interrupt may fall into them.
    from stepgraph.capture import bench_host, bench_serve, generate, show_environment
    from stepgraph.capture.plan import command as plan
    from stepgraph.capture.profile import command as profile
    from stepgraph.capture.simulate import command as simulate

    parser = Parser(prog="stepgraph", description="Whole speculative-decoding steps, one graph for each (batch, k).")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    modules = (
        ("generate", "generate text", generate),
        ("plan", "predict steps on a GPU", plan),
        ("profile", "measure step times and acceptance here", profile),
        ("simulate", "compare policies for k in a drawn or recorded world", simulate),
        ("env", "describe this machine for a results file", show_environment),
    )
    for name, what, module in modules:
        command = commands.add_parser(name, help=what, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    bench = commands.add_parser("bench", help="measure the engine here").add_subparsers(
        dest="bench", required=True, metavar="WHAT", parser_class=Parser
    )
    benches = (
        ("serve", "requests that arrive in real time", bench_serve),
        ("host", "time of a step that is not the replay", bench_host),
    )
    for name, what, module in benches:
        command = bench.add_parser(name, help=what, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    compile_gate = commands.add_parser("compile", help="compile every kernel for GPUs that need not be here", add_help=False)
    compile_gate.set_defaults(run=None)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The `stepgraph` command line; returns the exit status."""

    def run() -> int:
        args, rest = build_parser().parse_known_args(argv)
        if args.command == "compile":
            from stepgraph.kernels.compile import main as compile_main

            return compile_main(rest)
        if rest:
            build_parser().error(f"unrecognized arguments: {' '.join(rest)}")
        return args.run(args)

    return guarded(run)


if __name__ == "__main__":
    sys.exit(main())
