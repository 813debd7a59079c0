"""Kernel microbenchmarks.

    python -m stepgraph.kernels.bench OP [--json [PATH]] [--dtype DTYPE] [--small]

OP is attention, norm, silu, rope, linear, ngram, work, advance or tail. Each row: kernel, provider, x, cache (warm or cold L2),
microseconds p20/p50/p80, GB/s and its share of the measured copy bandwidth, and what it ran on. A kernel is checked against
float64 first; a wrong one is reported as such, never with a time. Without a GPU the references run, marked as such: that tests
this program and says nothing about a kernel. `tail` is all of a step from logits to tokens (`stepgraph.kernels.bench_tail`), in
float32, with the number of its launches.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from stepgraph.kernels import bench_tail
from stepgraph.kernels.bench_cases import CASES, Case
from stepgraph.kernels.command import guarded
from stepgraph.kernels.output import require_writable
from stepgraph.kernels.testing import assert_kernel_close
from stepgraph.kernels.timing import cold_sets, copy_bandwidth, environment, time_calls


def rows_of(op: str, case: Case, device: torch.device) -> Iterator[dict]:
    """Rows of one point of a sweep: the kernel (on the CPU the reference), the eager reference, then the others."""
    base = {"kernel": op, "x": case.x, "unit": "us", **environment(device)}
    providers = {"reference": case.reference, **case.others}
    if device.type == "cuda":
        try:
            # Copies, since an op may write to its arguments.
            once = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in case.args]
            assert_kernel_close(case.pick(case.triton(*once)), case.reference, *case.args, pick=case.pick)
            providers = {"triton": case.triton, **providers}
        except AssertionError as error:
            yield {**base, "provider": "triton", "status": f"wrong: {error}"}
    for provider, function in providers.items():
        if function is None:
            yield {**base, "provider": provider, "status": "absent"}
            continue
        for temperature in ("warm", "cold"):
            if temperature == "cold" and device.type != "cuda":
                continue  # no cold figure without control over the cache
            sets = [case.args] if temperature == "warm" else cold_sets(case.args, case.nbytes, device)
            try:
                times = time_calls(function, sets, device)
            except Exception as error:
                yield {**base, "provider": provider, "status": f"failed: {error}"}
                break
            rate = case.nbytes / times["p50"] / 1e3
            share = rate / copy_bandwidth(device)
            yield {
                **base, "provider": provider, "status": "ok", "l2": temperature, **times,
                "gb_per_s": round(rate, 2), "share_of_copy": round(share, 4),
            }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """0, or 1 when a kernel was wrong."""
    parser = argparse.ArgumentParser(prog="python -m stepgraph.kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("op", choices=[*CASES, "tail"])
    parser.add_argument("--json", nargs="?", const="-", metavar="PATH", help="rows as JSON, to standard output by default")
    parser.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--small", action="store_true", help="one point per op; the default without a GPU")
    options = parser.parse_args(argv)
    try:
        require_writable("--json", options.json)
    except ValueError as error:
        parser.error(str(error))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = options.small or device.type == "cpu"

    if options.op == "tail":
        measured = bench_tail.rows(device, small)
    else:
        cases = CASES[options.op](device, getattr(torch, options.dtype), small)
        measured = (row for case in cases for row in rows_of(options.op, case, device))
    rows = []
    for row in measured:
        rows.append(row)
        if options.json != "-":
            print(line(row))
    if options.json == "-":
        print(json.dumps(rows))
    elif options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    if device.type == "cpu":
        print("no CUDA device: these are references on the CPU, not kernels", file=sys.stderr)
    return int(any(row["status"].startswith("wrong") for row in rows))


def line(row: dict) -> str:
    head = f"{row['kernel']:<10} {row['x']:<36} {row['provider']:<20}"
    if row["status"] != "ok":
        return f"{head} {row['status']}"
    figures = f"{row['p50']:>10.1f} us {row['gb_per_s']:>8.1f} GB/s {100 * row['share_of_copy']:>5.1f} % of copy"
    launches = f" {row['launches']:>3} launches" if "launches" in row else ""
    return f"{head} {row['l2']:<4} {figures}{launches}"


if __name__ == "__main__":
    sys.exit(guarded(main, "python -m stepgraph.kernels.bench"))
