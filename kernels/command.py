"""What every command does with errors, interrupts and an output that nobody reads. Imports nothing that takes time."""

import os
import sys
import warnings
from collections.abc import Callable

USAGE_ERROR = 2
INTERRUPTED = 130  # what a shell reports after Ctrl-C


def guarded(run: Callable[[], int], name: str = "stepgraph") -> int:
    """Run a command; errors become one sentence that begins with `name`. Returns the exit status."""

    def show_warning(message, category, filename, lineno, file=None, line=None) -> None:
        print(f"{name}: warning: {message}", file=sys.stderr)

    warnings.showwarning = show_warning
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:  # closed by the caller
            setattr(sys, stream, open(os.devnull, "w"))  # noqa: SIM115
        if hasattr(getattr(sys, stream), "reconfigure"):  # a notebook's streams and a StringIO take every character
            getattr(sys, stream).reconfigure(errors="replace")  # a terminal that cannot show one still gets the rest
    try:
        status = run()
        sys.stdout.flush()  # a short output is still held back, and what is wrong with writing it is to be said here
        return status
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return 1  # the reader of our output went away; there is nobody left to tell
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE_ERROR
    finally:
        _settle_stdout()


def _settle_stdout() -> None:
    """Drop what cannot be written: Python would complain about it once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
