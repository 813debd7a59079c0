"""The microbenchmark of a step's tail, `python -m stepgraph.kernels.bench tail`: transforms, rejection, log-probabilities.

A row per batch, k, vocabulary and kind of request, with the kernels that one tail launches on a GPU. Bytes are those of the
logits and the drafter's laws, each read once.
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch

from stepgraph.kernels.launch import KNOWN_TARGETS, record_launches
from stepgraph.kernels.logprobs import record_logprobs
from stepgraph.kernels.registry import implementation, use_implementation
from stepgraph.kernels.rejection import rejection_sample
from stepgraph.kernels.timing import copy_bandwidth, environment, time_calls
from stepgraph.kernels.transforms import transform_logits

OPS = {"transform_logits": transform_logits, "rejection_sample": rejection_sample, "record_logprobs": record_logprobs}
VOCABS, BATCHES, KS = (32_000, 128_256, 151_936), (1, 4, 16, 64), (1, 3, 5, 7)
KINDS = ("greedy", "sampled", "filtered", "transformed", "block")


def tail(ops: dict[str, Callable], t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """From logits to emitted tokens and accepted drafts, as in `stepgraph.capture.step`."""
    state = [
        t[name] for name in ("history", "transformed", "counts", "counts", "ones", "zeros", "zeros", "ids", "values", "ids")
    ]
    ops["transform_logits"](t["logits"], t["drafts"], t["rows"], t["base"], *state)
    sampling = [t[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "base", "method")]
    emitted, accepted, _ = ops["rejection_sample"](t["logits"], t["drafts"], t["law"], *sampling)
    ops["record_logprobs"](t["logits"], emitted, t["rows"], t["base"], t["wanted"], t["base"] + 1 + accepted, t["logprobs"])
    return emitted, accepted


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


def tail_of(which: str) -> Callable:
    """The tail on one implementation."""
    ops = {name: implementation(name, which) for name in OPS}

    def run(t: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        with use_implementation(which):  # for what the ops call
            return tail(ops, t)

    return run


def launches(k: int, vocab: int) -> int:
    """Kernels that one tail launches on a GPU, recorded without one."""
    with record_launches(KNOWN_TARGETS[90]) as specs:
        tail_of("triton")(tensors(1, k, vocab, "block", "meta"))
    return len(specs)


def rows(device: torch.device, small: bool) -> Iterator[dict]:
    """Rows as of `stepgraph.kernels.bench`, and `launches`. A kernel that decides otherwise than the reference gets no time."""
    providers = ("triton", "reference") if device.type == "cuda" else ("reference", "cpu")
    sweep = [(1, 3, VOCABS[0])] if small else product(BATCHES, KS, VOCABS)
    for (batch, k, vocab), kind in product(sweep, KINDS):
        arguments = tensors(batch, k, vocab, kind, device)
        nbytes = 4 * (arguments["logits"].numel() + arguments["law"].numel())
        base = {"kernel": "tail", "x": f"B={batch} k={k} V={vocab} {kind}", "unit": "us", **environment(device)}
        decided = [tail_of(which)({name: t.clone() for name, t in arguments.items()}) for which in providers]
        same = all(torch.equal(ours, theirs) for ours, theirs in zip(*decided, strict=True))
        for which in providers:
            if not same and which != "reference":
                yield {**base, "provider": which, "status": "wrong: decides otherwise than the reference"}
                continue
            times = time_calls(tail_of(which), [(arguments,)], device)
            rate = nbytes / times["p50"] / 1e3
            yield {
                **base, "provider": which, "status": "ok", "l2": "warm", **times, "launches": launches(k, vocab),
                "gb_per_s": round(rate, 2), "share_of_copy": round(rate / copy_bandwidth(device), 4),
            }  # fmt: skip
