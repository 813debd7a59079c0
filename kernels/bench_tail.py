"""Microbenchmark of a step's tail: logit transforms, rejection sampling and log-probabilities, from logits to tokens.

    python -m stepgraph.kernels.bench_tail [--json PATH|-] [--small]

A row per batch, k, vocabulary and kind of request: microseconds per tail (p20, p50, p80) and kernel launches. Without a GPU
the CPU implementations run, marked as such: that says nothing about a kernel.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from stepgraph.kernels.launch import KNOWN_TARGETS, record_launches
from stepgraph.kernels.logprobs import record_logprobs
from stepgraph.kernels.registry import implementation
from stepgraph.kernels.rejection import rejection_sample
from stepgraph.kernels.timing import environment, time_calls
from stepgraph.kernels.transforms import transform_logits

VOCABS, BATCHES, KS = (32_000, 128_256, 151_936), (1, 4, 16, 64), (1, 3, 5, 7)
KINDS = ("greedy", "sampled", "filtered", "transformed", "block")
OPS = {"transform_logits": transform_logits, "rejection_sample": rejection_sample, "record_logprobs": record_logprobs}


def tail(ops: dict, t: dict[str, torch.Tensor]) -> None:
    """From logits to emitted tokens, as in `stepgraph.capture.step`."""
    state = [
        t[name] for name in ("history", "transformed", "counts", "counts", "ones", "zeros", "zeros", "ids", "values", "ids")
    ]
    ops["transform_logits"](t["logits"], t["drafts"], t["rows"], t["base"], *state)
    sampling = [t[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "base", "method")]
    emitted, accepted, _ = ops["rejection_sample"](t["logits"], t["drafts"], t["law"], *sampling)
    ops["record_logprobs"](t["logits"], emitted, t["rows"], t["base"], t["wanted"], t["base"] + 1 + accepted, t["logprobs"])


def tensors(batch: int, k: int, vocab: int, kind: str, device: torch.device | str) -> dict[str, torch.Tensor]:
    """The state and rows of one tail; `kind` says what its requests ask for."""
    integers, reals = torch.zeros(batch, dtype=torch.int64, device=device), torch.zeros(batch, device=device)
    off = torch.zeros(batch, dtype=torch.bool, device=device)
    filtered = kind == "filtered"
    return {
        "logits": torch.randn(batch, k + 1, vocab, device=device, dtype=torch.float32),
        "drafts": torch.ones(batch, k, dtype=torch.int64, device=device),
        "law": torch.full((batch, k, vocab), 1 / vocab, device=device),
        "rows": torch.arange(batch, device=device),
        "base": integers + 500,
        "history": torch.ones(batch, 2048, dtype=torch.int64, device=device),
        "transformed": ~off if kind == "transformed" else off,
        "counts": integers,
        "ones": reals + 1.1,
        "zeros": reals,
        "ids": torch.full((batch, 8), 3, dtype=torch.int64, device=device),
        "values": torch.zeros(batch, 8, device=device),
        "temperature": reals if kind == "greedy" else reals + 0.8,
        "top_k": integers + (50 if filtered else 0),
        "top_p": reals + (0.9 if filtered else 1.0),
        "min_p": reals,
        "seed": integers + 7,
        "method": integers + (1 if kind == "block" else 0),
        "wanted": off,
        "logprobs": torch.zeros(batch, 2048, device=device),
    }


def launches(k: int, vocab: int) -> int:
    """Kernels that one tail launches on a GPU, recorded without one."""
    ops = {name: implementation(name, "triton") for name in OPS}
    with record_launches(KNOWN_TARGETS[90]) as specs:
        tail(ops, tensors(1, k, vocab, "block", "meta"))
    return len(specs)


def rows(device: torch.device, small: bool) -> Iterator[dict]:
    provider = "triton" if device.type == "cuda" else "cpu implementation, no kernel"
    sweep = [(1, 3, VOCABS[0]), (4, 3, VOCABS[0])] if small else product(BATCHES, KS, VOCABS)
    for (batch, k, vocab), kind in product(sweep, KINDS):
        arguments = (OPS, tensors(batch, k, vocab, kind, device))
        yield {
            "kernel": "tail", "provider": provider, "x": f"B={batch} k={k} V={vocab} {kind}", "unit": "us",
            "launches": launches(k, vocab), **time_calls(tail, [arguments], device), **environment(device),
        }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stepgraph.kernels.bench_tail", description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="rows as JSON; - for standard output")
    parser.add_argument("--small", action="store_true", help="two sizes; the default without a GPU")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = []
    for row in rows(device, options.small or device.type == "cpu"):
        found.append(row)
        if options.json != "-":
            print(f"{row['x']:<32} {row['provider']:<30} {row['p50']:>10.1f} us {row['launches']:>3} launches")
    if options.json == "-":
        print(json.dumps(found))
    elif options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
