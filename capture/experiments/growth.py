"""How the time of a step grows with context, batch and k, each against what it cannot be less than.

The floor of a step is the larger of two times: that of reading every weight once and the keys and values of every request, at
the rate at which a large tensor is read here; and that of its multiplications, at the rate of a large matrix product here. Both
rates are the fastest of a few tries. Look-up drafts, so that a step is one pass of the target over batch x (k + 1) rows.
"""

import time
from collections.abc import Callable, Iterator

import torch

from stepgraph.capture.build import EngineOptions
from stepgraph.capture.experiments.results import Table
from stepgraph.capture.profile.measure import measure_costs
from stepgraph.kernels.linear import linear
from stepgraph.kernels.packed import pack
from stepgraph.model.checkpoint import LoadedModel, load_model
from stepgraph.model.kv_cache import block_bytes
from stepgraph.model.transformer import multiplied

MODEL, K, CONTEXT = "smollm2-135m", 3, 128
# axis -> (batches, ks, contexts)
CURVES = {
    "context": ([1], [0, K], [128, 512, 2048, 4096, 8128]),
    "batch": ([1, 2, 4, 8, 16, 32], [0, K], [CONTEXT]),
    "k": ([1], list(range(8)), [CONTEXT]),
}
QUICK = {"context": ([1], [0], [16, 32]), "batch": ([1, 2], [0], [16]), "k": ([1], [0, 1], [16])}
SAYS = {
    "context": "Context: each token adds its keys and values to what is read, and the attention over them is what grows.",
    "batch": "Batch: the weights are read once for all rows, until the products of more rows take longer than that.",
    "k": "k: k + 1 rows share one reading of the weights, so the first drafts cost less than a step each.",
}


def fastest_s(call: Callable[[], object], device: torch.device, tries: int = 7) -> float:
    """Seconds of the fastest call: what else the machine does makes a call slower, and a floor must not move with it."""
    seconds = []
    for _ in range(tries):
        start_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start_s)
    return min(seconds)


def read_rate(device: torch.device) -> float:
    """Bytes a second read, of memory and not of a cache. Nothing is written: a copy reads more slowly."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**26, device=device)
    return source.nbytes / fastest_s(source.sum, device)


def matrix_rate(dtype: torch.dtype, device: torch.device, rows: int = 512, size: int = 1024) -> float:
    """Multiply-adds a second, counted as two operations, of a large product, with its weight packed as a step's are."""
    x, weight = torch.ones(rows, size, dtype=dtype, device=device), torch.ones(size, size, dtype=dtype, device=device)
    pack(weight)
    return 2 * rows * size * size / fastest_s(lambda: linear(x, weight, None, False), device)


def floors_ms(loaded: LoadedModel, batch: int, k: int, context: int, bytes_per_s: float, flops: float) -> dict[str, float]:
    """Least times of a step: of reading weights and KV, and of its products and attention."""
    config, rows = loaded.model.config, batch * (k + 1)
    weights = sum(weight.numel() for weight in multiplied(loaded.model))
    kv_bytes = batch * context * block_bytes(config, 1, loaded.model.dtype)
    attention = 4 * rows * context * config.num_layers * config.num_heads * config.head_dim
    return {
        "read_ms": (weights * loaded.model.dtype.itemsize + kv_bytes) / bytes_per_s * 1e3,
        "compute_ms": (2 * rows * weights + attention) / flops * 1e3,
    }


def growth_rows(loaded: LoadedModel, curves: dict, repeats: int) -> Iterator[dict]:
    """A row for each point of each curve: the median of replays, its spread, and both floors."""
    device, dtype = loaded.model.device, loaded.model.dtype
    bytes_per_s, flops = read_rate(device), matrix_rate(dtype, device)
    options, named = (
        EngineOptions(loaded.name, "ngram", k=K),
        {"model": loaded.name, "dtype": str(dtype).removeprefix("torch.")},
    )
    for axis, (batches, ks, contexts) in curves.items():
        for row in measure_costs(options, loaded, batches, ks, contexts, repeats):
            at = row["batch"], row["k"], row["context"]
            floors = floors_ms(loaded, *at, bytes_per_s, flops)
            yield {"axis": axis, **named, **row, **{n: round(v, 6) for n, v in floors.items()}}


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """The embedded model in float32 and bfloat16; `quick` is a few points of random weights."""
    if quick:
        yield from growth_rows(load_model("random:tiny-llama"), QUICK, 2)
        return
    for dtype in (torch.float32, torch.bfloat16):
        yield from growth_rows(load_model(MODEL, dtype=dtype), CURVES, 7)


def _curves(rows: list[dict]) -> dict[tuple, list[dict]]:
    """Points of each curve; the k of a curve over k does not tell curves apart."""
    curves: dict[tuple, list[dict]] = {}
    for row in rows:
        curves.setdefault((row["axis"], row["dtype"], None if row["axis"] == "k" else row["k"]), []).append(row)
    return curves


def table(rows: list[dict]) -> Table:
    """A line for each curve: its points as step over floor, and the growth from the first to the last."""
    lines = []
    for (axis, dtype, k), points in _curves(rows).items():
        cells = [f"{p[axis]}: {p['step_ms']:.0f} ({max(p['read_ms'], p['compute_ms']):.0f})" for p in points]
        grown = points[-1]["step_ms"] / points[0]["step_ms"]
        lines.append([axis, dtype, "" if k is None else str(k), "; ".join(cells), f"{grown:.2f}"])
    axes = dict.fromkeys(row["axis"] for row in rows)
    note = " ".join(["Points: median step and its floor, both in ms.", *(SAYS[axis] for axis in axes)])
    return Table(["over", "dtype", "k", "at: step (floor)", "last / first"], lines, note)


def headlines(rows: list[dict]) -> list[tuple[str, str]]:
    """Growth of each curve from its first point to its last."""
    told = []
    for (axis, dtype, k), points in _curves(rows).items():
        ends = f"{axis} {points[-1][axis]} over {points[0][axis]}" + ("" if k is None else f", k = {k}")
        told.append((f"time of a step, {dtype}: {ends}", f"{points[-1]['step_ms'] / points[0]['step_ms']:.2f}"))
    return told
