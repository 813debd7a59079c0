"""The `gpu`-marked tests, the sanitizer among them."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[3]
FOLDERS = ("tests/kernels/gpu", "tests/capture/test_cuda.py", "tests/capture/test_switch.py", "tests/capture/plan/test_plan.py")
LIMIT_S = 420


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """A row for each file of tests: how many passed, failed and were skipped, and the end of what failed."""
    for folder in FOLDERS[:1] if quick else FOLDERS:
        yield {"tests": folder, **_run_tests(folder)}


def _run_tests(folder: str) -> dict:
    # Only what every machine with pytest has: no plug-ins of ours are needed for these tests.
    options = ["-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", *options]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        environment.pop("TRITON_INTERPRET", None)
        try:
            done = subprocess.run(
                [*command, folder], cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
            )
        except subprocess.TimeoutExpired as stopped:
            output = stopped.stdout or b""
            text = output.decode("utf-8", "replace") if isinstance(output, bytes) else output
            return {"status": f"stopped after {LIMIT_S} s", "output": text[-6000:]}
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|skipped|errors?|deselected)", done.stdout)}
    failed = done.returncode not in (0, 5)
    output = done.stdout[-6000:] + done.stderr[-1000:] if failed else ""
    return {"status": "failed" if failed else "ok", **counts, "output": output}
