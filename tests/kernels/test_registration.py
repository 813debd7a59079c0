"""Every op of the namespace `stepgraph`: its schema, its shape function, and that none is forgotten here."""

import importlib
import pkgutil

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import stepgraph.kernels
from stepgraph.kernels.registry import implementation

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
    "linear": lambda k: (
        [(floats(BATCH, k + 1, 6), floats(5, 6), bias, invariant) for bias in (None, floats(5)) for invariant in (True, False)]
        + [(floats(BATCH, k + 1, 6), ints(5, 6, high=99).to(torch.int8), floats(5), False, floats(5))]
    ),
    "rope_kv_write": lambda k: [rope(k), rope(k, norms=False)],
    "uniform_decode_attention": lambda k: [attention(k), (*attention(k), None, torch.zeros(4, dtype=torch.int32), floats(99))],
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


# Arguments whose first dimension no other argument has to share.
FREE_ROWS = {
    ("rms_norm", "x"), ("silu_mul", "gate_up"), ("linear", "x"), ("linear", "weight"),
    ("rope_kv_write", "rope"), ("build_attention_work", "seq_lens"), ("ngram_propose", "history"), ("advance", "results"),
    ("uniform_decode_attention", "work"), ("uniform_decode_attention", "scratch"),
}  # fmt: skip
ANY_DIMENSIONS = {("rms_norm", "x"), ("silu_mul", "gate_up"), ("linear", "x")}


def entries(name):
    """Ways to call an op: through the dispatcher, as a trace does, and its launcher, which refuses before it launches."""

    def fake(*arguments):
        with FakeTensorMode() as mode:
            op(name)(*tree_map(lambda a: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a, arguments))

    return op(name), fake, implementation(name, "triton")


@pytest.mark.parametrize("name", SAMPLES)
def test_wrong_arguments_are_named(name):
    """Each tensor with another dtype, a dimension more and a row less; a launcher would read past the end of a short one."""
    for arguments in SAMPLES[name](2):
        for index, argument in enumerate(op(name)._schema.arguments[: len(arguments)]):
            tensor = arguments[index]
            if not isinstance(tensor, torch.Tensor):
                continue
            other = tensor.to(torch.float32 if tensor.dtype == torch.int64 else torch.int64)
            wrong = [(rf"({argument.name} is \w+ \[|the Triton kernel takes .*, not torch.int64)", other)]
            if (name, argument.name) not in ANY_DIMENSIONS:
                wrong.append(("[^:]+ is .*; allowed ", tensor[None]))
            if (name, argument.name) not in FREE_ROWS:
                wrong.append(("[^:]+ is .*; allowed ", tensor[:-1]))
            for message, value in wrong:
                for call in entries(name):
                    with pytest.raises(ValueError, match=rf"^{name}: {message}"):
                        call(*arguments[:index], value, *arguments[index + 1 :])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("linear", {"weight": floats(5, 4)}, r"weight is float32 \[5, 4\]; allowed is float32 \[any, 6\]"),
        ("linear", {"weight": floats(5, 6).half()}, r"weight is float16 \[5, 6\]; allowed is float32"),
        ("linear", {"bias": floats(1)}, r"bias is float32 \[1\]; allowed is float32 \[5\]"),
        ("linear", {"x": floats(2, 0), "weight": floats(5, 0)}, r"weight is \[5, 0\]; allowed is \[N, K\] with K ≥ 1"),
        ("silu_mul", {"gate_up": torch.ones(2, 5)}, r"gate_up is \[2, 5\]; allowed is \[..., 2 I\]"),
        ("rms_norm", {"x": floats(2, 0), "weight": floats(0)}, r"x is \[2, 0\]; allowed is \[..., N\] with N ≥ 1"),
        ("rope_kv_write", {"rope": floats(0, HEAD_DIM)}, r"rope is \[0, 8\]; allowed is \[P, D\] with P ≥ 1"),
        ("rope_kv_write", {"k_cache": floats(6, 4, 0, 8)}, r"k_cache is \[6, 4, 0, 8\]; allowed is .* with each ≥ 1"),
        ("uniform_decode_attention", {"k_cache": floats(6, 0, KV_HEADS, HEAD_DIM)}, r"k_cache is \[6, 0, 2, 8\]; allowed is"),
        ("uniform_decode_attention", {"q": floats(BATCH, 3, 0, HEAD_DIM)}, "q has 0 heads; allowed are multiples of"),
        ("ngram_propose", {"history": ints(SLOTS, 0)}, r"history is \[4, 0\]; allowed is \[S, max_len\] with max_len ≥ 1"),
        ("ngram_propose", {"min_match": 0}, "min_match and max_match are 0 and 3; allowed is 1 ≤ min_match ≤ max_match"),
        ("ngram_propose", {"min_match": 4}, "min_match and max_match are 4 and 3"),
        ("ngram_propose", {"k": -1}, "k is -1; allowed is 0 or more"),
        ("build_attention_work", {"pool_tokens": -1}, "pool_tokens is -1; allowed is 0 or more"),
        ("uniform_decode_attention", {"q": floats(BATCH, 3, 3, HEAD_DIM)}, "q has 3 heads; allowed are multiples of"),
        ("uniform_decode_attention", {"q": floats(BATCH, 3, HEADS, HEAD_DIM).bfloat16()}, "k_cache is torch.float32; allowed"),
        ("uniform_decode_attention", {"q": floats(BATCH, 3, HEADS, 4)}, r"k_cache is float32 \[6, 4, 2, 8\]; allowed"),
        ("rope_kv_write", {"num_heads": 5}, r"qkv is float32 \[3, 3, 64\]; allowed is any float \[any, any, 72\]"),
        ("advance", {"emitted": ints(BATCH, 6)}, "emitted has 6 columns; allowed are 1 to k_max \\+ 1 = 5"),
        ("advance", {"results": ints(SLOTS, 7)}, r"results is \[4, 7\]; allowed are \[3, 8\] and more of each"),
        ("advance", {"results": ints(2, 10)}, r"results is \[2, 10\]; allowed are \[3, 8\] and more of each"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_together_are_named(name, changes, message):
    arguments = dict(zip([a.name for a in op(name)._schema.arguments], SAMPLES[name](2)[0], strict=False)) | changes
    for call in entries(name):
        with pytest.raises(ValueError, match=f"^{name}: {message}"):
            call(*arguments.values())


@pytest.mark.parametrize("name", ["uniform_decode_attention", "rope_kv_write"])
def test_an_fp8_cache_needs_scales(name):
    arguments = dict(zip([a.name for a in op(name)._schema.arguments], SAMPLES[name](2)[0], strict=False))
    arguments |= {cache: arguments[cache].to(torch.float8_e4m3fn) for cache in ("k_cache", "v_cache")}
    for scales, message in ((None, "a KV cache of .* needs kv_scales"), (torch.ones(2, 3), r"kv_scales is float32 \[2, 3\]")):
        for call in entries(name):
            with pytest.raises(ValueError, match=f"^{name}: {message}"):
                call(*arguments.values(), scales)


def spread(tensor):
    """The same numbers, none next to another."""
    if tensor.dim() == 1:
        return torch.stack([tensor, tensor], 1)[:, 0]
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "linear"])
def test_strides_of_what_is_read_change_nothing(name):
    """Not the bits of what is returned and written, and not the strides of what is returned, which a trace relies on."""
    schema = op(name)._schema.arguments
    for function in (op(name), implementation(name, "reference")):
        for arguments in SAMPLES[name](2):
            plain = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
            spaced = [
                value if not isinstance(value, torch.Tensor) else value.clone() if argument.is_write else spread(value)
                for argument, value in zip(schema, arguments, strict=False)
            ]
            with FakeTensorMode() as mode:
                fake = op(name)(*tree_map(lambda a: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a, spaced))
            expected, actual = ([t for t in tree_leaves(function(*some)) if t is not None] for some in (plain, spaced))
            assert [t.stride() for t in actual] == [t.stride() for t in tree_leaves(fake) if t is not None]
            for old, new in zip(expected + plain, actual + spaced, strict=True):
                assert not isinstance(old, torch.Tensor) or torch.equal(old, new)


@pytest.mark.parametrize("name", SAMPLES)
def test_no_rows_at_all(name):
    for arguments in SAMPLES[name](0):
        none = [a[:0] if isinstance(a, torch.Tensor) and a.shape[0] == BATCH else a for a in arguments]
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in none]
        shapes = [
            [t.shape for t in tree_leaves(function(*none)) if t is not None]
            for function in (op(name), implementation(name, "reference"))
        ]
        assert shapes[0] == shapes[1]
        for old, new in zip(before, none, strict=True):
            assert not isinstance(old, torch.Tensor) or torch.equal(old, new)
