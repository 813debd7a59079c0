"""Everything a GPU can tell: `python benchmarks/gpu.py [--part N] [--dry]`, from a plain checkout, installed or not."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
MODULE = "stepgraph.capture.experiments.gpu_day.command"


def main() -> int:
    # The folders of the checkout are the package's floors; a folder of links stands for an installation.
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "stepgraph"
        package.mkdir()
        for floor in ("kernels", "model", "capture"):
            (package / floor).symlink_to(CHECKOUT / floor, target_is_directory=True)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
        return subprocess.run([sys.executable, "-m", MODULE, *sys.argv[1:]], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
