"""The compiled attention of the CPU: the same bits however its work is shared out, and nothing read beyond the caches."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from attention_cases import assert_close, call, world

from stepgraph.kernels import openmp

numba_cpu = pytest.importorskip("stepgraph.kernels.attention.numba_cpu", reason="Numba is not installed")
has = pytest.importorskip("stepgraph.kernels.tile_ir").has
attention = numba_cpu.uniform_decode_attention_numba
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture
def threads():
    """Sets the number of PyTorch's threads; afterwards it is as before."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@both_dtypes
@pytest.mark.parametrize("window", [0, 3])
def test_threads_do_not_change_bits(dtype, window, threads, monkeypatch):
    """Fewer of them than there are rows and KV heads, more, and where PyTorch has none that we know."""
    inputs = world([50, 9, 0, 33, 17], 5, heads=6, kv_heads=3, head_dim=40, dtype=dtype) | {"window": window}
    threads(1)
    alone = call(attention, inputs)
    for number in (2, 4, 64):
        threads(number)
        assert torch.equal(call(attention, inputs), alone)
    monkeypatch.setattr(openmp, "team", lambda: None)
    assert torch.equal(call(attention, inputs), alone)


def test_calls_at_the_same_time_do_not_disturb_each_other(threads):
    threads(2)
    inputs = [world([50, 9, 33], 3, heads=4, kv_heads=2, head_dim=32, dtype=torch.float32, seed=seed) for seed in range(4)]
    alone, found = [call(attention, each) for each in inputs], [[] for _ in inputs]

    def run(each, into):
        into += [call(attention, each) for _ in range(30)]

    callers = [threading.Thread(target=run, args=pair) for pair in zip(inputs, found, strict=True)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(len(outs) == 30 and all(torch.equal(out, one) for out in outs) for outs, one in zip(found, alone, strict=True))


@both_dtypes
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("head_dim", [1, 24, 64, 96])
def test_bits_do_not_depend_on_the_queries_beside_a_query(dtype, block_size, head_dim):
    """Whether keys and values are read in place or filled up first, and windows that begin and end inside of a tile."""
    lengths, query_len = [8, 21, 40], 8
    for groups, window in ((1, 0), (3, 0), (5, 2), (3, 5)):
        options = {"heads": 2 * groups, "head_dim": head_dim, "block_size": block_size, "dtype": dtype}
        inputs = world(lengths, query_len, **options) | {"window": window}
        assert_close(attention, inputs)
        out = call(attention, inputs)
        for count in (1, 2, 7):
            last = call(attention, inputs, q=inputs["q"][:, -count:])
            assert torch.equal(last, out[:, -count:]), (groups, window, count)


@both_dtypes
def test_long_contexts(dtype):
    assert_close(attention, world([8000, 8190], 4, heads=6, kv_heads=2, head_dim=64, block_size=16, dtype=dtype))


@both_dtypes
def test_caches_may_have_any_strides(dtype):
    """Blocks apart, as where keys and values of a block lie together, are read in place; what else there is, is not."""
    inputs = world([9, 17], 3, heads=3, kv_heads=1, head_dim=16, dtype=dtype)
    expected = call(attention, inputs)
    keys, values = inputs["k_cache"], inputs["v_cache"]
    together = torch.stack([keys, values], 1)
    assert torch.equal(call(attention, inputs, k_cache=together[:, 0], v_cache=together[:, 1]), expected)
    for changed in (
        lambda cache: torch.cat([torch.full_like(cache, torch.nan), cache], 2)[:, :, 1:],  # one of two KV heads
        lambda cache: torch.cat([torch.full_like(cache, torch.nan), cache], 3)[..., 16:],
        lambda cache: cache.transpose(1, 3).contiguous().transpose(1, 3),
        lambda cache: torch.cat([cache.new_zeros(1), cache.flatten()])[1:].view(cache.shape),  # not aligned
    ):
        assert torch.equal(call(attention, inputs, k_cache=changed(keys), v_cache=changed(values)), expected)


def test_tables_and_lengths_may_be_int32_and_apart():
    inputs = world([9, 17], 3, dtype=torch.float32)
    wide = torch.stack([inputs["block_table"]] * 2, 2).int()[..., 0]
    lengths = torch.tensor([[9, 0], [17, 0]], dtype=torch.int32)[:, 0]
    assert torch.equal(call(attention, inputs, block_table=wide, seq_lens=lengths), call(attention, inputs))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks for memory as Linux gives it")
def test_nothing_is_read_outside_of_queries_and_caches():
    """They end, then begin, where memory does; a read beyond ends the process. Keys are read four at a time, wide."""
    code = """
import ctypes, mmap, sys
import torch
from attention_cases import call, world
from stepgraph.kernels.attention.numba_cpu import uniform_decode_attention_numba as attention
protect, page, kept = ctypes.CDLL(None).mprotect, mmap.PAGESIZE, []

def fenced(tensor, at_end):
    pages = -(-tensor.nbytes // page) * page
    kept.append(mmap.mmap(-1, pages + 2 * page))
    whole = torch.frombuffer(kept[-1], dtype=torch.uint8)
    for fence in (0, page + pages):
        assert protect(ctypes.c_void_p(whole.data_ptr() + fence), page, 0) == 0
    first = page + (pages - tensor.nbytes if at_end else 0)
    return whole[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

for dtype in (torch.float32, torch.bfloat16):
    for head_dim in (1, 8, 16, 24, 32, 80):
        for block_size in (1, 2, 3, 4, 16):
            for at_end in (False, True):
                inputs = world([6, 16], 3, heads=3, kv_heads=1, head_dim=head_dim, block_size=block_size, dtype=dtype)
                near = {name: fenced(inputs[name], at_end) for name in ("q", "k_cache", "v_cache")}
                assert torch.equal(call(attention, inputs, **near), call(attention, inputs))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not has("avx2", "fma"), reason="an AVX2 processor's code")
def test_on_a_processor_with_less(tmp_path):
    """The same tests with code for AVX2 alone: other steps of bfloat16, one query in a tile."""
    fewer = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "beside_a_query or bits and threads"]
    done = subprocess.run([*command, __file__], env=os.environ | fewer, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout
