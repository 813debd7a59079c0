"""What a figure depends on beside the code that was measured: machine, driver, libraries, revision."""

import hashlib
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

from stepgraph.kernels import tables

FLOORS = ("kernels", "model", "capture")


def environment() -> dict:
    """The block that every results file carries; entries are None where the machine does not say.

    Clocks are in MHz, power in watts, memory in bytes. The revision is that of the checkout this package runs from, and
    `dirty` says whether its code differs from it.
    """
    return {
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "git": _git(Path(__file__).resolve().parents[1]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton_version(),
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_cores": os.cpu_count(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": _gpu(),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(("TRITON_", "OMP_", "CUDA_"))
        },
        "tables_sha256": tables_hash(),
    }


def device_slug() -> str:
    """Name of the folder that holds this machine's results, e.g. `nvidia-h200`."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def cpu_name() -> str:
    """Model name of the processor, or its architecture where the system has no name for it."""
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


def tables_hash() -> str:
    """Of the frozen launch configurations, which decide speed and bits."""
    content = b"".join(path.read_bytes() for path in sorted(tables.FOLDER.glob("*.json")))
    return hashlib.sha256(content).hexdigest()[:16]


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:  # not built for this platform
        return None
    return triton.__version__


def _git(checkout: Path) -> dict | None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(checkout), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()

    try:
        if not all((Path(git("rev-parse", "--show-toplevel")) / floor).is_dir() for floor in FLOORS):
            return None  # installed inside somebody else's checkout
        return {"revision": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", *FLOORS))}
    except (OSError, subprocess.SubprocessError):
        return None


def _gpu() -> dict | None:
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    found = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }
    query = {
        "driver": "driver_version",
        "clock_mhz": "clocks.sm",
        "max_clock_mhz": "clocks.max.sm",
        "memory_clock_mhz": "clocks.mem",
        "power_limit_w": "power.limit",
    }
    try:
        command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(query.values())}", "--format=csv,noheader,nounits"]
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
        values = [value.strip() for value in answer.strip().split(",")]
    except (OSError, subprocess.SubprocessError):
        values = [None] * len(query)
    return found | dict(zip(query, values, strict=False))
