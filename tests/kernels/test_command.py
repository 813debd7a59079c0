"""Commands whose output goes nowhere, or whose work fails: one sentence and a status, whenever Python flushes."""

import contextlib
import io
import os
import subprocess
import sys
import warnings

import pytest

from stepgraph.kernels.command import guarded

BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


def outcome(body, stdout, **environment):
    """(status, stderr) of a process that runs `body` guarded, with `name` for its own."""
    code = f"import sys\nfrom stepgraph.kernels.command import guarded\ndef run():\n    {body}\nsys.exit(guarded(run, 'name'))"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=BUFFERED | environment, timeout=60)
    return done.returncode, done.stderr


@pytest.fixture(params=[{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "unbuffered"])
def environment(request):
    return request.param


def test_a_reader_that_went_away_is_no_error_to_speak_of(environment):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert outcome("print('x'); return 0", writer, **environment) == (1, "")
    finally:
        os.close(writer)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_an_output_that_cannot_be_kept_is_an_error(environment):
    with open("/dev/full", "w") as full:
        status, said = outcome("print('x'); return 0", full, **environment)
    assert status == 2
    assert said == "name: error: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("raise ValueError('two\\nlines')", (2, "name: error: two lines\n")),
        ("raise KeyboardInterrupt", (130, "name: interrupted\n")),
        ("import warnings; warnings.warn('w'); return 3", (3, "name: warning: w\n")),
    ],
)
def test_what_ends_a_command_is_one_line(body, expected):
    assert outcome(body, subprocess.DEVNULL) == expected


def test_a_command_runs_where_output_is_no_file():
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors), warnings.catch_warnings():
        assert guarded(lambda: print("x") or 0) == 0
        assert guarded(lambda: int("y"), "name") == 2
    assert said.getvalue() == "x\n"
    assert errors.getvalue().startswith("name: error: invalid literal for int()")
