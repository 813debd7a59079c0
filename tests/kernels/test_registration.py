"""Every op of the namespace `stepgraph`: its schema, its shape function, and that none is forgotten here."""

import importlib
import pkgutil

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import stepgraph.kernels

for module in pkgutil.walk_packages(stepgraph.kernels.__path__, "stepgraph.kernels."):
    importlib.import_module(module.name)

BATCH, VOCAB, HEADS, KV_HEADS, HEAD_DIM, SLOTS, MAX_LEN = 3, 7, 4, 2, 8, 4, 12


def ints(*shape, high=3):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


def floats(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def sampling(rows):
    return torch.tensor([0.0, 0.8, 1.0]).repeat(rows)[:rows], ints(rows), torch.full((rows,), 0.9), torch.full((rows,), 0.05)


def caches():
    return floats(6, 4, KV_HEADS, HEAD_DIM), floats(6, 4, KV_HEADS, HEAD_DIM)


def attention(k):
    return (floats(BATCH, k + 1, HEADS, HEAD_DIM), *caches(), ints(BATCH, 2, high=6), torch.tensor([0, 5, 8]), 0.3, 4, 2.0)


def rope(k, norms=True):
    norm = floats(HEAD_DIM) if norms else None
    slots = torch.arange(BATCH * (k + 1)).view(BATCH, k + 1) + 4
    slots[0] = -1
    qkv = floats(BATCH, k + 1, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    return (qkv, ints(BATCH, k + 1), floats(16, HEAD_DIM), slots, *caches(), norm, norm, HEADS, 1e-6)


def rejection(k, sampled=True):
    law = floats(BATCH, k, VOCAB).softmax(-1) if sampled else None
    return (floats(BATCH, k + 1, VOCAB), ints(BATCH, k), law, *sampling(BATCH), ints(BATCH), ints(BATCH))


def rejection_options(k):
    rates, one_hot, d2t = torch.full((BATCH, 4), 0.5), torch.tensor([True, False, False]), torch.arange(5) + 1
    return (*rejection(k)[:2], floats(BATCH, k, 5).softmax(-1), *rejection(k)[3:], torch.arange(BATCH), rates, one_hot, d2t)


def transforms(k):
    rows = SLOTS + 1
    slots, base = torch.tensor([1, 0, SLOTS]), ints(BATCH) + 2
    bias_ids = torch.tensor([[1, -1, 3]]).expand(rows, 3).contiguous()
    state = (ints(rows, MAX_LEN), ints(rows, high=2) > 0, ints(rows), ints(rows, high=MAX_LEN), floats(rows).exp())
    bias = (bias_ids, floats(rows, 3), ints(rows, 2, high=VOCAB))
    return (floats(BATCH, k + 1, VOCAB), ints(BATCH, k), slots, base, *state, floats(rows), floats(rows), *bias)


def logprobs(k):
    wanted = torch.tensor([True, True, False, True, False])
    slots, lengths = torch.tensor([1, 0, SLOTS]), ints(SLOTS + 1) + 3
    rows = (floats(BATCH, k + 1, VOCAB), ints(BATCH, k + 1), slots, ints(BATCH) + 1)
    return (*rows, wanted, lengths, floats(SLOTS + 1, MAX_LEN))


def advance(k):
    return (
        torch.tensor([1, 0, SLOTS]), torch.tensor([True, True, False]), ints(BATCH, k + 1), torch.full((BATCH,), k),
        torch.full((BATCH,), k), ints(BATCH), ints(SLOTS + 1), ints(SLOTS + 1), ints(SLOTS + 1, MAX_LEN),
        torch.zeros_like(ints(SLOTS + 1)),
        ints(SLOTS + 1), ints(SLOTS + 1, 4), ints(SLOTS + 1, 4), ints(SLOTS + 1), ints(SLOTS, 10),
        ints(SLOTS + 1, 2, high=9), torch.full((SLOTS + 1,), MAX_LEN),
    )  # fmt: skip


# op -> for each k, the argument lists it is tried with
SAMPLES = {
    "rms_norm": lambda k: [
        (floats(BATCH, k + 1, 16, dtype=dtype), floats(16, dtype=dtype), 1e-6) for dtype in (torch.float32, torch.bfloat16)
    ],
    "add_rms_norm": lambda k: [(floats(BATCH, k + 1, 16), floats(BATCH, k + 1, 16), floats(16), 1e-6)],
    "silu_mul": lambda k: [(floats(BATCH, k + 1, 10),), (floats(k + 1, 10, dtype=torch.bfloat16),)],
    "linear": lambda k: [
        (floats(BATCH, k + 1, 6), floats(5, 6), bias, invariant) for bias in (None, floats(5)) for invariant in (True, False)
    ],
    "rope_kv_write": lambda k: [rope(k), rope(k, norms=False)],
    "uniform_decode_attention": lambda k: [attention(k)],
    "build_attention_work": lambda k: [(torch.tensor([0, 5, 8]), k + 1, window, 8, 24) for window in (0, 4)],
    "token_law": lambda k: [
        (floats(BATCH * (k + 1), VOCAB, dtype=dtype), *sampling(BATCH * (k + 1)))
        for dtype in (torch.float32, torch.float64, torch.bfloat16)
    ],
    "draw": lambda k: [(floats(BATCH + k, VOCAB).softmax(-1), ints(BATCH + k), ints(BATCH + k), ints(BATCH + k), 2)],
    "rejection_sample": lambda k: [rejection(k), rejection(k, sampled=False), rejection_options(k)],
    "transform_logits": lambda k: [transforms(k)],
    "record_logprobs": lambda k: [logprobs(k)],
    "ngram_propose": lambda k: [(ints(SLOTS + 1, MAX_LEN), torch.tensor([1, 0, SLOTS]), ints(BATCH, high=MAX_LEN), k, 1, 3)],
    "advance": lambda k: [advance(k)],
}


def test_every_op_has_a_sample():
    prefix = "stepgraph::"
    names = {n.removeprefix(prefix).split(".")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith(prefix)}
    assert names == set(SAMPLES)


def op(name):
    return getattr(torch.ops.stepgraph, name).default


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    """The schema tells what is written, nothing returned aliases an input, and fake equals real; also under AOT tracing."""
    for index, arguments in enumerate(SAMPLES[name](2)):
        tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
        if index == 0:
            tests.append("test_aot_dispatch_dynamic")
        results = torch.library.opcheck(op(name), arguments, test_utils=tests)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("k", range(4))
@pytest.mark.parametrize("name", SAMPLES)
def test_fake_shapes_equal_real_ones(name, k):
    for arguments in SAMPLES[name](k):
        with FakeTensorMode() as mode:
            fake = op(name)(*tree_map(lambda a: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a, arguments))
        real = op(name)(*arguments)
        assert [(t.shape, t.dtype, t.stride()) for t in tree_leaves(fake) if t is not None] == [
            (t.shape, t.dtype, t.stride()) for t in tree_leaves(real) if t is not None
        ]


@pytest.mark.parametrize("name", SAMPLES)
def test_only_named_arguments_are_written(name):
    """Without relying on the schema check: inputs keep their bytes unless the schema marks them."""
    mutable = {argument.name for argument in op(name)._schema.arguments if argument.is_write}
    assert mutable == {
        "rope_kv_write": {"k_cache", "v_cache"},
        "uniform_decode_attention": {"scratch"},
        "transform_logits": {"logits"},
        "record_logprobs": {"logprobs"},
        "advance": {
            "seq_len", "last_token", "history", "finished", "steps", "drafted_at", "accepted_at", "repaired_total", "results",
        },
    }.get(name, set())  # fmt: skip
    for arguments in SAMPLES[name](3):
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        op(name)(*arguments)
        # Samples leave out trailing arguments that have a default.
        for argument, old, new in zip(op(name)._schema.arguments, before, arguments, strict=False):
            if isinstance(old, torch.Tensor) and argument.name not in mutable:
                assert torch.equal(old, new), argument.name


@pytest.mark.parametrize("name", SAMPLES)
def test_both_devices_have_an_implementation(name):
    for key in ("CPU", "CUDA"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"stepgraph::{name}", key)
