"""Offline tuner: time the candidates of one table on this GPU and rewrite the table, with provenance.

    python -m stepgraph.kernels.tune attention|linear [--model llama-3.1-8b] [--dtype bfloat16] [--write]

A candidate has to be right before it is timed. The choice may not depend on Q or the batch (rows would change bits), so the
score is the geometric mean over a sweep of both. Changing a field under `"bits"` changes the bits of results: say so in the
commit that brings the new table.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product

import torch
from torch import Tensor

from stepgraph.kernels import tables
from stepgraph.kernels.command import guarded
from stepgraph.kernels.shapes import ModelShape, shape_named
from stepgraph.kernels.testing import assert_kernel_close, paged_case

ATTENTION_SPACE = {"tile_kv": (32, 64, 128), "num_warps": (4, 8), "kv_buffers": (1, 2, 3), "occupancy": (1, 2, 3)}
LINEAR_SPACE = {
    "block_n": (32, 64, 128),
    "block_k": (64, 128),
    "num_warps": (4, 8),
    "num_stages": (3, 4, 5),
    "programs": (132, 264, 528),
}


def candidates(space: dict[str, tuple]) -> Iterator[dict]:
    for values in product(*space.values()):
        yield dict(zip(space, values, strict=True))


def best_candidate(
    space: dict[str, tuple], run: Callable[[dict], list[float]], report: Callable[[str], None] = print
) -> tuple[dict, float]:
    """(candidate, score): the least geometric mean of the times that `run` gives; candidates that raise are passed over."""
    best = None
    for candidate in candidates(space):
        try:
            times = run(candidate)
        except Exception as error:  # out of shared memory or registers, or a wrong result: the reason is printed
            report(f"{candidate}: {type(error).__name__}: {error}")
            continue
        score = math.exp(sum(map(math.log, times)) / len(times))
        report(f"{candidate}: {score:.2f} us")
        if best is None or score < best[1]:
            best = candidate, score
    if best is None:
        raise RuntimeError("no candidate ran")
    return best


def updated_table(name: str, content: dict, match: dict, config: dict, provenance: dict) -> dict:
    """The table with one more entry, in place of an earlier one with the same match; checked."""
    entries = [entry for entry in content["entries"] if entry["match"] != match]
    table = {**content, "entries": [*entries, {"match": match, "config": config, "provenance": provenance}]}
    tables.check(name, table)
    return table


def _attention_run(shape: ModelShape, dtype: torch.dtype) -> Callable[[dict], list[float]]:
    from stepgraph.kernels.attention.launcher import attention_config, uniform_decode_attention_triton
    from stepgraph.kernels.attention.reference import uniform_decode_attention_reference
    from stepgraph.kernels.launch import target_of
    from stepgraph.kernels.timing import time_calls

    def case(batch: int, query_len: int, context: int):
        group = shape.heads // shape.kv_heads
        options = {"group": group, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "dtype": dtype, "device": "cuda"}
        made = paged_case([context] * batch, query_len=query_len, **options)
        return replace(made, k_cache=made.k_cache.nan_to_num(), v_cache=made.v_cache.nan_to_num())

    small = case(2, 4, 700)
    sweep = [case(batch, query_len, context) for batch, query_len, context in product((1, 32), (1, 4, 8), (1024, 8192))]

    def run(candidate: dict) -> list[float]:
        config = replace(attention_config(small.q, small.k_cache, target_of(small.q)), **candidate)

        def call(*args: Tensor | float):
            return uniform_decode_attention_triton(*args, config=config)

        assert_kernel_close(call(*small.args), uniform_decode_attention_reference, *small.args)
        return [time_calls(call, [point.args], torch.device("cuda"))["p50"] for point in sweep]

    return run


def _linear_run(shape: ModelShape, dtype: torch.dtype) -> Callable[[dict], list[float]]:
    from stepgraph.kernels.linear import linear_library
    from stepgraph.kernels.linear_triton import linear_triton
    from stepgraph.kernels.timing import time_calls

    weights = [
        torch.randn(size, device="cuda").mul_(shape.hidden**-0.5).to(dtype)
        for size in ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate), (shape.hidden, shape.hidden))
    ]

    def run(candidate: dict) -> list[float]:
        times = []
        for weight, rows in product(weights, (1, 8, 64)):
            x = torch.randn(rows, weight.shape[1], device="cuda").to(dtype)

            def call(x: Tensor, weight: Tensor):
                return linear_triton(x, weight, None, config=candidate)

            assert_kernel_close(call(x, weight), linear_library, x, weight, None)
            times.append(time_calls(call, [(x, weight)], torch.device("cuda"))["p50"])
        return times

    return run


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stepgraph.kernels.tune", description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=("attention", "linear"))
    parser.add_argument("--model", default="llama-3.1-8b", help="whose shapes are timed")
    parser.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--write", action="store_true", help="rewrite the table; without it the new one is printed")
    options = parser.parse_args(argv)
    shape = shape_named(options.model)
    if not torch.cuda.is_available():
        print("tuning times kernels, which takes a CUDA device; there is none", file=sys.stderr)
        return 2

    from stepgraph.kernels.launch import target_of
    from stepgraph.kernels.timing import environment

    device = torch.device("cuda")
    dtype = getattr(torch, options.dtype)
    run, space = {"attention": (_attention_run, ATTENTION_SPACE), "linear": (_linear_run, LINEAR_SPACE)}[options.table]
    config, score = best_candidate(space, run(shape, dtype))
    match = {"arch": target_of(torch.empty(1, device=device)).arch, "dtype": options.dtype}
    if options.table == "attention":
        match |= {"group": shape.heads // shape.kv_heads, "head_dim": shape.head_dim}
    provenance = {
        "method": "timed",
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"python -m stepgraph.kernels.tune {options.table} --model {options.model} --dtype {options.dtype}",
        "geometric_mean_us": round(score, 3),
        **environment(device),
    }
    table = updated_table(options.table, tables.load(options.table), match, config, provenance)
    if options.write:
        tables.path_of(options.table).write_text(json.dumps(table, indent=2) + "\n")
    else:
        print(json.dumps(table, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main, "python -m stepgraph.kernels.tune"))
