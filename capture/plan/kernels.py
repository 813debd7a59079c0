"""Compiled resources of the kernels that a plan launches."""

import json
from pathlib import Path

from stepgraph.capture.plan.launches import Launches


def unknown_kernels(launches: Launches) -> list[dict]:
    """Names alone, for a plan that compiled nothing."""
    arch = f"sm_{launches.target.arch}"
    nothing = {"arch": arch, "registers": None, "shared_bytes": None, "spills": None}
    return [{"name": name, **nothing} for name in sorted(launches.specs)]


def compiled_kernels(launches: Launches) -> list[dict]:
    """Compile one variant of each kernel for the plan's architecture, which takes about a second each."""
    from stepgraph.kernels.binary import inspect

    rows = []
    for name, spec in sorted(launches.specs.items()):
        compiled = spec.compile(launches.target)
        binary = inspect(compiled.asm["cubin"])
        rows.append(_row(name, launches.target.arch, binary.registers, compiled.metadata.shared, binary.stack))
    return rows


def kernels_from_gate(launches: Launches, path: str) -> list[dict]:
    """The worst figures of each kernel over all configurations in a JSON file of `stepgraph compile --json`."""
    try:
        gate = json.loads(Path(path).read_text(encoding="utf-8"))
        found = [row for row in gate if row["arch"] == f"sm_{launches.target.arch}" and row["kernel"] in launches.specs]
        names = sorted({row["kernel"] for row in found})
        return [
            _row(
                name,
                launches.target.arch,
                *(max(row[figure] for row in found if row["kernel"] == name) for figure in ("registers", "shared", "spill")),
            )
            for name in names
        ]
    except OSError as error:
        raise ValueError(f"--gate is {path!r}, which cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"--gate is {path!r}, which is not what `stepgraph compile --json` writes") from None


def _row(name: str, arch: int, registers: int, shared: int, spills: int) -> dict:
    return {"name": name, "arch": f"sm_{arch}", "registers": registers, "shared_bytes": shared, "spills": spills}
