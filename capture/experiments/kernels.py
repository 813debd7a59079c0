"""Kernel microbenchmarks as a table: every op of `python -m stepgraph.kernels.bench`, and the sampling tail."""

from collections.abc import Iterator

import torch

from stepgraph.capture.experiments.results import Table
from stepgraph.kernels import bench_tail
from stepgraph.kernels.bench import rows_of
from stepgraph.kernels.bench_cases import CASES


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """Rows op by op, in bfloat16; without a GPU one point an op, of the references alone."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = quick or device.type == "cpu"
    torch.manual_seed(seed)
    for op in ("silu", "norm") if quick else CASES:
        for case in CASES[op](device, torch.bfloat16, small):
            yield from rows_of(op, case, device)
    yield from bench_tail.rows(device, small)


def table(rows: list[dict]) -> Table:
    lines = [
        [
            row["kernel"], row["x"], row["provider"], row["l2"], f"{row['p50']:.1f} ({row['p20']:.1f} to {row['p80']:.1f})",
            f"{row['gb_per_s']:.1f}", f"{100 * row['share_of_copy']:.0f} %",
        ]
        for row in rows
        if row["status"] == "ok"
    ]  # fmt: skip
    wrong = dict.fromkeys(
        f"{row['kernel']} by {row['provider']}, {row['x']}: {row['status']}."
        for row in rows
        if row["status"] not in ("ok", "absent")
    )
    absent = ", ".join(dict.fromkeys(row["provider"] for row in rows if row["status"] == "absent"))
    note = "Median (p20 to p80); bandwidth counts the bytes that have to move, against a measured copy."
    if all("cpu" in row["device"] for row in rows):
        note += " On a CPU the references run: that says nothing about a kernel."
    header = ["kernel", "shape", "provider", "L2", "µs", "GB/s", "of copy bandwidth"]
    return Table(header, lines, " ".join([note, *([f"Absent: {absent}."] if absent else []), *wrong]))


def headlines(rows: list[dict]) -> list[tuple[str, str]]:
    """The largest share of the copy bandwidth that each Triton kernel reaches with a cold cache; a CPU has none."""
    best: dict[str, dict] = {}
    for row in rows:
        if row["status"] == "ok" and row["provider"] == "triton" and row["l2"] == "cold":
            best[row["kernel"]] = max(best.get(row["kernel"], row), row, key=lambda r: r["share_of_copy"])
    return [
        (f"share of copy bandwidth, cold L2: {kernel}, {row['x']}", f"{100 * row['share_of_copy']:.0f} %")
        for kernel, row in best.items()
    ]
