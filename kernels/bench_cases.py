"""What the microbenchmarks run: for each op, sweeps named after real models."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from stepgraph.kernels import baselines
from stepgraph.kernels.activation import silu_mul_reference
from stepgraph.kernels.advance import RESULT_HEAD, advance_reference
from stepgraph.kernels.attention.reference import uniform_decode_attention_reference
from stepgraph.kernels.attention.work import HEADER, SPLIT, build_attention_work_reference
from stepgraph.kernels.linear import linear_library
from stepgraph.kernels.ngram import ngram_propose_reference
from stepgraph.kernels.norm import add_rms_norm_reference
from stepgraph.kernels.registry import implementation
from stepgraph.kernels.rope_kv import rope_kv_write_reference
from stepgraph.kernels.shapes import ModelShape, shape_named
from stepgraph.kernels.testing import paged_case

MODELS = ("llama-3.2-1b", "llama-3.1-8b", "qwen3-8b")


@dataclass(frozen=True)
class Case:
    """One point of a sweep.

    Attributes:
        x: the point's name, e.g. `"llama-3.1-8b B=32 Q=4 ctx=4096"`.
        args: arguments of every provider.
        nbytes: bytes that have to move between memory and the processor at least.
        reference: the op's specification; for `linear`, the library's product.
        op: the op's name.
        others: provider -> function, or None where it is absent.
        pick: the tensor to compare where the op returns several.
        wrap: turns an implementation of the op into what is called, for an op that returns nothing.
    """

    x: str
    args: tuple
    nbytes: int
    reference: Callable
    op: str
    others: dict[str, Callable | None]
    pick: Callable = lambda out: out
    wrap: Callable[[Callable], Callable] = lambda function: function

    @property
    def triton(self) -> Callable:
        return self.wrap(implementation(self.op, "triton"))


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _attention(device: torch.device, dtype: torch.dtype, small: bool) -> Iterator[Case]:
    sweep = [(1, 4, 64)] if small else [(b, q, ctx) for ctx in (1024, 4096) for b in (1, 8, 32, 64) for q in (1, 2, 4, 8)]
    for name in MODELS[:1] if small else MODELS:
        shape = shape_named(name)
        for batch, query_len, context in sweep:
            case = paged_case(
                [context] * batch,
                query_len=query_len,
                group=shape.heads // shape.kv_heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                dtype=dtype,
                device=str(device),
            )
            case.k_cache.nan_to_num_()
            case.v_cache.nan_to_num_()
            kv_bytes = 2 * batch * context * shape.kv_heads * shape.head_dim * dtype.itemsize
            others = {p: f if baselines.installed(module) else None for p, (module, f) in baselines.ATTENTION.items()}
            x = f"{name} B={batch} Q={query_len} ctx={context}"
            yield Case(
                x, case.args, kv_bytes + 2 * _bytes(case.q), uniform_decode_attention_reference,
                "uniform_decode_attention", others,
            )  # fmt: skip


def _rows(small: bool) -> Iterator[tuple[str, ModelShape, int]]:
    for name in MODELS[:1] if small else MODELS:
        for tokens in (4,) if small else (1, 8, 64, 256):
            yield f"{name} tokens={tokens}", shape_named(name), tokens


def _norm(device: torch.device, dtype: torch.dtype, small: bool) -> Iterator[Case]:
    for x, shape, tokens in _rows(small):
        a, b = torch.randn(2, tokens, shape.hidden, device=device).to(dtype).unbind(0)
        weight = torch.randn(shape.hidden, device=device).to(dtype)
        args = (a.contiguous(), b.contiguous(), weight, 1e-6)
        yield Case(x, args, 4 * _bytes(a) + _bytes(weight), add_rms_norm_reference, "add_rms_norm", {}, lambda out: out[0])


def _silu(device: torch.device, dtype: torch.dtype, small: bool) -> Iterator[Case]:
    for x, shape, tokens in _rows(small):
        gate_up = torch.randn(tokens, 2 * shape.intermediate, device=device).to(dtype)
        yield Case(x, (gate_up,), _bytes(gate_up) * 3 // 2, silu_mul_reference, "silu_mul", {})


def _rope(device: torch.device, dtype: torch.dtype, small: bool) -> Iterator[Case]:
    for x, shape, tokens in _rows(small):
        qkv = torch.randn(tokens, 1, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, device=device).to(dtype)
        positions = torch.arange(tokens, device=device)[:, None]
        rope = torch.randn(4096, shape.head_dim, device=device)
        cache = torch.zeros(2, tokens // 16 + 2, 16, shape.kv_heads, shape.head_dim, device=device, dtype=dtype)
        args = (qkv, positions, rope, positions + 16, cache[0], cache[1], None, None, shape.heads, 1e-6)
        yield Case(x, args, 2 * _bytes(qkv), rope_kv_write_reference, "rope_kv_write", {})


def _linear(device: torch.device, dtype: torch.dtype, small: bool) -> Iterator[Case]:
    for x, shape, tokens in _rows(small):
        rows = torch.randn(tokens, shape.hidden, device=device).to(dtype)
        size = (shape.hidden, shape.hidden) if small else (2 * shape.intermediate, shape.hidden)
        weight = (torch.randn(size, device=device) * shape.hidden**-0.5).to(dtype)
        nbytes = _bytes(rows, weight) + tokens * size[0] * dtype.itemsize
        yield Case(x, (rows, weight, None, True), nbytes, linear_library, "linear", {})


def _ngram(device: torch.device, dtype: torch.dtype, small: bool) -> Iterator[Case]:
    sweep = [(1, 64)] if small else [(b, ctx) for ctx in (1024, 16_384) for b in (1, 8, 64)]
    for batch, context in sweep:
        history = torch.arange(batch * context, device=device).view(batch, context) % 997
        rows = torch.arange(batch, device=device)
        args = (history, rows, torch.full_like(rows, context - 1), 4, 2, 4)
        yield Case(f"B={batch} ctx={context} k=4", args, _bytes(history), ngram_propose_reference, "ngram_propose", {})


def _work(device: torch.device, dtype: torch.dtype, small: bool) -> Iterator[Case]:
    for batch, context in [(2, 64)] if small else [(b, ctx) for ctx in (4096, 131_072) for b in (1, 32, 256)]:
        lengths = torch.full((batch,), context, device=device)
        listed = 8 * batch * -(-context // SPLIT)  # a row and a split, int32, for each entry
        args = (lengths, 4, 0, context, batch * context)
        yield Case(
            f"B={batch} ctx={context}", args, _bytes(lengths) + listed, build_attention_work_reference,
            "build_attention_work", {}, lambda out, rows=batch: out[: HEADER + rows],
        )  # fmt: skip


RESULTS = 14  # which argument of `advance` is what the host reads


def _and_results(advance: Callable) -> Callable:
    def call(*args: torch.Tensor) -> torch.Tensor:
        advance(*args)
        return args[RESULTS]

    return call


def _advance(device: torch.device, dtype: torch.dtype, small: bool) -> Iterator[Case]:
    """One draft of k accepted, two tokens committed; there is room for more calls than the timing makes."""
    k, room = 4, 4096
    for batch in (2,) if small else (1, 8, 64, 256):
        row = torch.arange(batch, device=device)
        slot = torch.zeros(batch + 1, dtype=torch.int64, device=device)
        emitted = torch.full((batch, k + 1), -1, device=device)
        emitted[:, :2] = 7
        at_position = torch.zeros(batch + 1, k, dtype=torch.int64, device=device)
        results = torch.zeros(batch, RESULT_HEAD + k + 1, dtype=torch.int64, device=device)
        step = (row, row >= 0, emitted, torch.ones_like(row), torch.full_like(row, k), torch.zeros_like(row))
        state = (slot + 9, slot.clone(), slot[:, None].repeat(1, room), slot.clone(), slot.clone())
        counters = (at_position, at_position.clone(), slot.clone(), results)
        args = (*step, *state, *counters, torch.full((batch + 1, 8), -1, device=device), slot + room)
        nbytes = _bytes(*step, results) + 2 * _bytes(*state[:2], *state[3:], *counters[:3]) + _bytes(*args[-2:]) + 16 * batch
        yield Case(
            f"B={batch} k={k}", args, nbytes, _and_results(advance_reference), "advance", {}, wrap=_and_results
        )  # fmt: skip


CASES: dict[str, Callable[[torch.device, torch.dtype, bool], Iterator[Case]]] = {
    "attention": _attention,
    "norm": _norm,
    "silu": _silu,
    "rope": _rope,
    "linear": _linear,
    "ngram": _ngram,
    "work": _work,
    "advance": _advance,
}
