"""What a node of a traced step has to move and to compute, from its shapes.

Bytes are the least traffic with device memory: each input read once, each output written once. Rules of the project's own ops
count what the kernel reads for a batch, not the whole state it is given; every other op moves its operands.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

# Each registers its ops, which are looked up below.
from stepgraph.kernels import advance, attention, linear, logprobs, ngram, rope_kv, transforms  # noqa: F401

aten, ours = torch.ops.aten, torch.ops.stepgraph


class Cost(NamedTuple):
    """Of one node; `dtype` is that of its matrix products, None when it has none."""

    nbytes: float
    flops: float
    dtype: torch.dtype | None = None


def size_bytes(*values: object) -> int:
    """Bytes of all tensors among the values."""
    return sum(leaf.numel() * leaf.itemsize for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def value_of(argument: object) -> object:
    """The fake tensor of a node, or the argument itself."""
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def is_view(node: Node) -> bool:
    """Whether the op only makes another view of its input: no launch, no traffic."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):  # an element of a tuple
        return True
    returns = target._schema.returns
    aliases = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return aliases or target in (aten._unsafe_view.default, aten.detach.default, aten.lift_fresh.default)


def _linear(out, context, x, weight, bias, invariant) -> Cost:
    rows = x.numel() // x.shape[-1]
    return Cost(size_bytes(x, weight, bias, out), 2.0 * rows * weight.numel(), x.dtype)


def _attention(out, context, q, k_cache, v_cache, *rest) -> Cost:
    batch, query_len, _, head_dim = q.shape
    window = rest[3]
    seen = min(context, window + query_len - 1) if window else context
    kv_bytes = 2 * batch * seen * k_cache.shape[2] * head_dim * k_cache.itemsize
    return Cost(size_bytes(q, out) + kv_bytes, 4.0 * q.numel() * seen, q.dtype)


def _rope_kv_write(out, context, qkv, positions, rope, slots, k_cache, v_cache, *rest) -> Cost:
    rows = positions.numel()
    table_bytes = rows * rope.shape[1] * rope.itemsize
    return Cost(2 * size_bytes(qkv) + table_bytes, 6.0 * qkv.numel())


def _ngram(out, context, history, slots, last, *rest) -> Cost:
    return Cost(len(slots) * context * history.itemsize + size_bytes(out), float(len(slots) * context))


def _asked_for(out, context, logits, *rest) -> Cost:
    """Transforms and log-probabilities: the kernel reads a flag per row and ends, unless the request asked for them."""
    return Cost(len(logits), 0.0)


def _advance(out, context, slots, live, emitted, *rest) -> Cost:
    results = rest[-3]
    return Cost(size_bytes(slots, live, emitted) + 2 * len(slots) * results.shape[1] * results.itemsize, 0.0)


def _gather(out, context, source, *rest) -> Cost:
    """Only what is picked moves, whatever it is picked from."""
    return Cost(2 * size_bytes(out) + size_bytes(*(r for r in tree_leaves(rest) if isinstance(r, Tensor))), 0.0)


RULES: dict[object, Callable[..., Cost]] = {
    ours.linear.default: _linear,
    ours.uniform_decode_attention.default: _attention,
    ours.rope_kv_write.default: _rope_kv_write,
    ours.ngram_propose.default: _ngram,
    ours.transform_logits.default: _asked_for,
    ours.record_logprobs.default: _asked_for,
    ours.advance.default: _advance,
    aten.embedding.default: _gather,
    aten.index.Tensor: _gather,
    aten.gather.default: lambda out, context, source, dim, index: _gather(out, context, source, index),
}


def cost_of(node: Node, context: int) -> Cost:
    """The cost of a node whose requests have `context` tokens in the cache."""
    if is_view(node):
        return Cost(0.0, 0.0)
    values = torch.fx.node.map_arg(node.args, value_of)
    out = node.meta.get("val")
    rule = RULES.get(node.target)
    if rule is not None:
        return rule(out, context, *values)
    outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    return Cost(size_bytes(values, out), float(sum(leaf.numel() for leaf in outputs)))
