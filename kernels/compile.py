"""The compile gate: compile every kernel that the model shapes launch, for processors that need not be here, and judge it.

    python -m stepgraph.kernels.compile [--arch sm_80,sm_90,sm_100] [--quick] [--jobs N] [--json PATH|-] [--keep FOLDER]

It fails on a register spill, on more shared memory than a program may have, on an atomic in a kernel that promises the same
bits each run, and where a 16-bit attention or matrix kernel lacks tensor-core instructions or 128-bit loads in its main loop.
Compilation runs in processes of its own, without the interpreter and with a fresh cache. A row is written as soon as it is
there; with `--keep`, rows of a compilation that has not changed (source, types, constants, options, Triton, assembler's
target) are taken from the folder, so an interrupted gate goes on where it was.
"""

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from stepgraph.kernels.command import guarded
from stepgraph.kernels.output import require_writable

ARCHES = (80, 90, 100)
MATRIX_KERNELS = ("uniform_decode_attention_kernel", "linear_kernel")


def requests(arch: int, quick: bool) -> Iterator[tuple[str, dict]]:
    """(model, arguments of `step_launches`) of everything the gate compiles for one arch."""
    from stepgraph.kernels.shapes import MODEL_SHAPES

    if quick:
        yield "llama-3.1-8b", {"batch": 8, "query_len": 4}
        return
    for shape in MODEL_SHAPES:
        for query_len in range(1, 10):
            yield shape.name, {"batch": 8, "query_len": query_len}
        yield shape.name, {"batch": 1, "query_len": 512}
    for name in ("llama-3.1-8b", "phi-2"):
        yield name, {"batch": 8, "query_len": 4, "dtype": torch.float16}
        yield name, {"batch": 8, "query_len": 4, "dtype": torch.float32}
        yield name, {"batch": 8, "query_len": 4, "block_size": 32}
        yield name, {"batch": 8, "query_len": 4, "block_size": 128}
    if arch >= 90:  # e4m3 conversion needs sm_89
        yield "llama-3.1-8b", {"batch": 8, "query_len": 4, "cache_dtype": torch.float8_e4m3fn}


def compile_shard(arches: list[int], quick: bool, shard: int, shards: int, output: Path, known: set[str]) -> None:
    """Append a row to `output` (JSON lines) for every `shards`-th distinct compilation that is not among `known` keys."""
    from stepgraph.kernels.launch import KNOWN_TARGETS
    from stepgraph.kernels.shapes import shape_named
    from stepgraph.kernels.step_launches import step_launches

    seen = set()
    with output.open("a", encoding="utf-8") as rows:
        rows.write("\n")  # an interrupted run may have left half a line
        for arch in arches:
            for model, arguments in requests(arch, quick):
                for spec in step_launches(shape_named(model), KNOWN_TARGETS[arch], **arguments):
                    key = _key(spec, arch)
                    if key in seen:
                        continue
                    seen.add(key)
                    if len(seen) % shards == shard and key not in known:
                        rows.write(json.dumps(_row(spec, arch, model, arguments) | {"key": key}) + "\n")
                        rows.flush()
        rows.write(json.dumps({"keys": sorted(seen)}) + "\n")


def _key(spec, arch: int) -> str:
    """A digest of all that decides what is compiled."""
    import triton

    source = spec.source()
    decides = (arch, triton.__version__, spec.kernel.cache_key, source.signature, source.constants, source.attrs, spec.options)
    return hashlib.sha256(repr(decides).encode()).hexdigest()[:20]


def _row(spec, arch: int, model: str, arguments: dict) -> dict:
    from stepgraph.kernels.binary import inspect
    from stepgraph.kernels.launch import KNOWN_TARGETS

    target = KNOWN_TARGETS[arch]
    compiled = spec.compile(target)
    binary = inspect(compiled.asm["cubin"])
    row = {
        "kernel": spec.name,
        "arch": f"sm_{arch}",
        "model": model,
        **{name: str(value).removeprefix("torch.") for name, value in arguments.items()},
        "num_warps": spec.num_warps,
        "registers": binary.registers,
        "shared": compiled.metadata.shared,
        "shared_limit": target.shared_limit,
        "spill": binary.stack,
        "cubin": binary.size,
        "tensor_core": binary.tensor_core,
        "loads_128": binary.wide_loads,
        "loads_narrow": binary.narrow_loads,
        "atomics": binary.atomics if spec.deterministic else [],
    }
    return row | {"faults": faults(row)}


def faults(row: dict) -> list[str]:
    """What is wrong with one compiled kernel; empty when nothing is."""
    found = []
    if row["spill"]:
        found.append(f"spills {row['spill']} bytes per thread")
    if row["shared"] > row["shared_limit"]:
        found.append(f"{row['shared']} bytes of shared memory, {row['shared_limit']} allowed")
    if row["atomics"]:
        found.append(f"atomics in a deterministic kernel: {', '.join(row['atomics'])}")
    if row["kernel"] in MATRIX_KERNELS and row.get("dtype", "bfloat16") != "float32":
        if not row["tensor_core"]:
            found.append("no tensor-core instruction in the main loop")
        if not row["loads_128"]:
            found.append("no 128-bit load in the main loop")
    return found


def table(rows: list[dict]) -> str:
    """A line per kernel and arch: the worst of its configurations, and the instruction kinds in their main loops."""
    lines = [("kernel", "arch", "configs", "registers", "shared", "spill", "cubin", "faulty", "main loop")]
    for kernel, arch in sorted({(row["kernel"], row["arch"]) for row in rows}, key=lambda key: (key[0], int(key[1][3:]))):
        group = [row for row in rows if (row["kernel"], row["arch"]) == (kernel, arch)]
        kinds = sorted({kind for row in group for kind in row["tensor_core"]})
        if any(row["loads_128"] for row in group):
            kinds.append("128-bit loads")
        worst = [str(max(row[field] for row in group)) for field in ("registers", "shared", "spill", "cubin")]
        faulty = str(sum(bool(row["faults"]) for row in group))
        lines.append((kernel.removesuffix("_kernel"), arch, str(len(group)), *worst, faulty, ", ".join(kinds)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    left = (0, 1, len(widths) - 1)
    return "\n".join(
        "  ".join(cell.ljust(w) if c in left else cell.rjust(w) for c, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def run(arches: list[int], quick: bool, jobs: int, keep: Path | None = None) -> list[dict]:
    """Compile in `jobs` processes and return the rows of all; rows that `keep` already holds are not compiled again."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "TRITON_CACHE_DIR": str(Path(scratch) / "cache"), "OMP_NUM_THREADS": "1"}
        environment.pop("TRITON_INTERPRET", None)
        folder = keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        outputs = [folder / f"{shard}.jsonl" for shard in range(jobs)]
        command = [sys.executable, "-m", "stepgraph.kernels.compile", "--arch", ",".join(f"sm_{arch}" for arch in arches)]
        command += ["--quick"] if quick else []
        workers = [
            subprocess.Popen(
                [*command, "--shard", f"{shard}/{jobs}", "--keep", str(folder)],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for shard in range(jobs)
        ]
        try:
            errors = [worker.communicate()[1] for worker in workers]
        finally:  # an interrupt may reach this process alone; those that it started are not to go on without it
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.wait()
        for worker, error in zip(workers, errors, strict=True):
            if worker.returncode:
                raise RuntimeError(f"a compile worker failed:\n{error[-4000:]}")
        wanted = json.loads(outputs[0].read_text(encoding="utf-8").splitlines()[-1])["keys"]
        rows = kept_rows(folder)
        return [rows[key] for key in wanted]


def kept_rows(folder: Path) -> dict[str, dict]:
    """Rows by key; a line cut short by an interruption is passed over."""
    rows = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if "key" in row:
                rows[row.pop("key")] = row
    # Judged anew: what counts as a fault may have changed since.
    return {key: row | {"faults": faults(row)} for key, row in rows.items()}


def main(argv: list[str] | None = None) -> int:
    """0 when every kernel passes, 1 when one does not."""
    parser = argparse.ArgumentParser(prog="stepgraph compile", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default=",".join(f"sm_{arch}" for arch in ARCHES), help="comma-separated")
    parser.add_argument("--quick", action="store_true", help="one model, one query length")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    parser.add_argument("--json", metavar="PATH", help="write the rows as JSON; - for standard output")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep rows here, and reuse those that are still valid")
    parser.add_argument("--shard", help=argparse.SUPPRESS)  # set by the parent process
    options = parser.parse_args(argv)
    known_arches = {f"sm_{arch}": arch for arch in ARCHES}
    names = options.arch.split(",")
    for name in names:
        if name not in known_arches:
            parser.error(f"--arch is {options.arch!r}; allowed are {', '.join(known_arches)}, separated by commas")
    arches = [known_arches[name] for name in names]
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; allowed is 1 or more")
    if options.shard:
        shard, shards = map(int, options.shard.split("/"))
        known = set(kept_rows(options.keep))
        compile_shard(arches, options.quick, shard, shards, options.keep / f"{shard}.jsonl", known)
        return 0

    if options.json not in (None, "-"):
        with contextlib.suppress(OSError):  # said better below
            Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        try:
            require_writable("--json", options.json)
        except ValueError as error:
            parser.error(str(error))
    if options.keep is not None:
        try:
            options.keep.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--keep is {str(options.keep)!r}, which cannot be a folder: {error.strerror}")
    rows = run(arches, options.quick, options.jobs, options.keep)
    if options.json == "-":
        print(json.dumps(rows))
    else:
        print(table(rows))
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    bad = [row for row in rows if row["faults"]]
    for row in bad:
        where = ", ".join(f"{name} {row[name]}" for name in ("model", "query_len", "block_size", "dtype") if name in row)
        print(f"{row['kernel']} {row['arch']} ({where}): {'; '.join(row['faults'])}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(guarded(main, "stepgraph compile"))
