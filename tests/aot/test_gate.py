"""The compile gate's quick subset, its judgement, and that a spec says what the JIT would compile."""

import json
import re
import signal
import subprocess
import sys

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from stepgraph.kernels import compile as gate
from stepgraph.kernels.binary import main_loop, parse_listing
from stepgraph.kernels.launch import KNOWN_TARGETS, LaunchSpec
from stepgraph.kernels.shapes import MODEL_SHAPES
from stepgraph.kernels.step_launches import step_launches

GOOD = {
    "kernel": "linear_kernel",
    "spill": 0,
    "shared": 1000,
    "shared_limit": 232_448,
    "atomics": [],
    "tensor_core": ["HMMA"],
    "loads_128": 8,
}


def test_quick_gate_passes_and_goes_on_where_it_was(tmp_path):
    path, keep = tmp_path / "rows.json", tmp_path / "keep"
    arguments = ["--quick", "--arch", "sm_90", "--json", str(path), "--keep", str(keep)]
    assert gate.main(arguments) == 0
    rows = json.loads(path.read_text())

    # As an interruption leaves it: a row is missing, one is cut short; the others show that they were not made again.
    lines = [json.loads(line) for line in (keep / "0.jsonl").read_text().split("\n") if line]
    marked = [json.dumps(line | {"registers": -1}) for line in lines if "key" in line]
    (keep / "0.jsonl").write_text("\n".join(marked[2:]) + "\n" + marked[1][:40])
    assert gate.main(arguments) == 0
    again = json.loads(path.read_text())
    assert len(again) == len(rows)
    assert sum(row["registers"] == -1 for row in again) == len(marked) - 2
    assert [row | {"registers": 0} for row in again] == [row | {"registers": 0} for row in rows]
    attention = next(row for row in rows if row["kernel"] == "uniform_decode_attention_kernel")
    assert attention["spill"] == 0
    assert attention["tensor_core"] == ["HMMA"]
    assert attention["loads_128"] > 0
    kernels = {row["kernel"] for row in rows}
    assert {"rms_norm_kernel", "silu_mul_kernel", "rope_kv_write_kernel", "linear_kernel", "merge_splits_kernel"} <= kernels


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"spill": 8}, "spills"),
        ({"shared": 393_216}, "shared memory"),
        ({"atomics": ["RED.E.ADD.F32"]}, "atomics"),
        ({"tensor_core": []}, "tensor-core"),
        ({"loads_128": 0}, "128-bit"),
        ({"loads_128": 0, "tensor_core": [], "dtype": "float32"}, None),
    ],
)
def test_judgement(change, fault):
    found = gate.faults(GOOD | change)
    assert found == [] if fault is None else (len(found) == 1 and fault in found[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_75"], "--arch is 'sm_75'; allowed are sm_80, sm_90, sm_100, separated by commas"),
        (["--arch", "sm_80,ninety"], "--arch is 'sm_80,ninety'; allowed are"),
        (["--jobs", "0"], "--jobs is 0; allowed is 1 or more"),
        (["--json", "/dev/null/rows.json"], "--json is '/dev/null/rows.json', which cannot be written"),
        (["--keep", "/dev/null/rows"], "--keep is '/dev/null/rows', which cannot be a folder: Not a directory"),
    ],
)
def test_bad_options_are_refused_before_anything_is_compiled(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(gate, "run", None)
    with pytest.raises(SystemExit, match="2"):
        gate.main(arguments)
    assert message in capsys.readouterr().err


def test_an_interrupted_gate_leaves_no_process_behind(monkeypatch):
    started = []

    class Worker(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **options)
            started.append(self)

        def communicate(self, *args):
            raise KeyboardInterrupt

    monkeypatch.setattr(gate.subprocess, "Popen", Worker)
    with pytest.raises(KeyboardInterrupt):
        gate.run([90], quick=True, jobs=2)
    assert [worker.returncode for worker in started] == [-signal.SIGTERM] * 2


def test_main_loop_of_a_listing():
    listing = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   LDGSTS.E.BYPASS.128 [R2], [R4.64] ;
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R2, R8 ;
        /*0030*/              @P0  BRA 0x10 ;
        /*0040*/                   RED.E.ADD.F32 [R2.64], R5 ;
        /*0050*/                   BRA 0x50;
    """
    instructions = parse_listing(listing)
    assert instructions[0][1] == "MOV"
    assert dict(main_loop(instructions)) == {"LDGSTS.E.BYPASS.128": 1, "HMMA.16816.F32.BF16": 1, "BRA": 1}


def test_spec_specialises_as_the_jit_does():
    backend = make_backend(GPUTarget("cuda", 90, 32))
    shape = next(shape for shape in MODEL_SHAPES if shape.name == "qwen2.5-7b")
    specs = step_launches(shape, KNOWN_TARGETS[90], batch=3, query_len=2)
    for spec in specs:
        binder = create_function_from_signature(spec.kernel.signature, spec.kernel.params, backend)
        _, specialization, _ = binder(**spec.args, **spec.constexprs)
        source = spec.source()
        assert list(source.signature.values()) == [kind for kind, _ in specialization]
        aligned = [isinstance(key, str) and "D" in key for _, key in specialization]
        assert [(index,) in source.attrs for index in range(len(aligned))] == aligned


def test_an_offset_view_is_not_taken_for_aligned():
    spec = step_launches(MODEL_SHAPES[0], KNOWN_TARGETS[90], batch=1, query_len=1)[0]
    shifted = torch.empty(600, dtype=torch.bfloat16, device="meta")[1:577]
    moved = LaunchSpec(spec.kernel, spec.grid, {**spec.args, "x_ptr": shifted}, spec.constexprs)
    assert (0,) in spec.source().attrs
    assert (0,) not in moved.source().attrs


def test_batches_share_compiled_code():
    """Nothing that varies with the batch is compiled in, except the padded width of the work-list kernel."""

    def keys(batch):
        specs = step_launches(MODEL_SHAPES[0], KNOWN_TARGETS[90], batch=batch, query_len=3)
        named = [spec for spec in specs if spec.name != "build_attention_work_kernel"]
        return [(spec.name, spec.source().signature, spec.source().constants, spec.source().attrs) for spec in named]

    assert keys(1) == keys(2) == keys(16)


def layouts(compiled) -> set[str]:
    """The register layouts of a kernel's products and row sums: they decide the order in which numbers are added."""
    lines = compiled.asm["ttgir"].splitlines()
    names = {line.split("=")[0].strip(): line.split("=", 1)[1].strip() for line in lines if line.startswith("#")}
    used = set()
    for line in lines:
        if "dot" in line or '"tt.reduce"' in line or "}) : (tensor<" in line:
            used |= {name for name in re.findall(r"#\w+", line) if "mma" in name}
    return {names[name] for name in used if name in names}


@pytest.mark.parametrize("arch", [80, 90])
def test_no_layout_of_attention_depends_on_the_query_length(arch):
    """Static evidence for bits: Q, and rows whole or split, leave the tensor-core layouts as they are."""
    shape = next(shape for shape in MODEL_SHAPES if shape.name == "llama-3.2-1b")
    found = {}
    for query_len in (1, 9, 40):
        specs = step_launches(shape, KNOWN_TARGETS[arch], batch=2, query_len=query_len)
        spec = next(spec for spec in specs if spec.name == "uniform_decode_attention_kernel")
        found[query_len] = layouts(spec.compile(KNOWN_TARGETS[arch]))
    assert found[1]
    assert found[1] == found[9] == found[40]
