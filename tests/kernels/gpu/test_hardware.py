"""What only hardware can show: true bf16, bits of a row whatever surrounds it, and memory accesses under the sanitizer."""

import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from stepgraph.kernels.testing import assert_kernel_close, assert_same_bits, guarded_allocations, paged_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# (group, head_dim, block_size, window, softcap): llama-8b, smollm2, phi-2, llama-70b, gemma, a window over blocks of 128.
SHAPES = [(4, 128, 16, 0, 0.0), (3, 64, 16, 0, 0.0), (1, 80, 16, 0, 0.0), (8, 128, 32, 0, 0.0), (2, 256, 16, 0, 50.0)]
SHAPES += [(5, 128, 128, 700, 0.0)]
LENGTHS = [2050, 513, 512, 17, 0, 1]


def clean(case):
    return replace(case, k_cache=case.k_cache.nan_to_num(), v_cache=case.v_cache.nan_to_num())


def attend(case, **options):
    from stepgraph.kernels.attention.launcher import uniform_decode_attention_triton

    return uniform_decode_attention_triton(*case.args, **options)


def attention_case(shape, dtype, query_len, lengths=LENGTHS):
    group, head_dim, block_size, window, softcap = shape
    options = {"group": group, "head_dim": head_dim, "block_size": block_size, "window": window, "softcap": softcap}
    return paged_case(lengths, query_len=query_len, dtype=dtype, device="cuda", **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("query_len", [1, 4, 9, 40])
def test_attention_matches_float64(shape, dtype, query_len):
    from stepgraph.kernels.attention import uniform_decode_attention_reference

    case = attention_case(shape, dtype, query_len)
    with guarded_allocations():
        out = attend(case)
    assert_kernel_close(out, uniform_decode_attention_reference, *clean(case).args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_row_has_the_bits_of_a_one_token_query(shape, dtype):
    case = attention_case(shape, dtype, 9)
    whole = attend(case)
    assert_same_bits(attend(case, whole_rows=True), whole)
    for row, length in enumerate(LENGTHS):
        for i in range(9):
            if length - 8 + i <= 0:
                continue
            one = replace(
                case,
                q=case.q[row : row + 1, i : i + 1].contiguous(),
                block_table=case.block_table[row : row + 1],
                seq_lens=torch.tensor([length - 8 + i], device="cuda"),
            )
            assert_same_bits(attend(one)[0, 0], whole[row, i])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("depth", [576, 4096])
def test_linear_row_has_the_bits_of_a_one_row_call(dtype, depth):
    from stepgraph.kernels.linear import linear

    x, weight = (torch.randn(rows, depth, device="cuda").to(dtype) for rows in (130, 1000))
    whole = linear(x, weight, None, True)
    assert_kernel_close(whole, torch.nn.functional.linear, x, weight, None)
    for row in (0, 1, 63, 64, 129):
        assert_same_bits(linear(x[row : row + 1].clone(), weight, None, True), whole[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_ops_match_float64(dtype):
    from stepgraph.kernels.activation import silu_mul, silu_mul_reference
    from stepgraph.kernels.norm import add_rms_norm, add_rms_norm_reference

    x, residual, weight = (torch.randn(*size, 4096, device="cuda").to(dtype) for size in ((64,), (64,), ()))
    out, total = add_rms_norm(x, residual, weight, 1e-6)
    assert_kernel_close(out, add_rms_norm_reference, x, residual, weight, 1e-6, pick=lambda out: out[0])
    assert_same_bits(total, x + residual)
    assert_same_bits(add_rms_norm(x[3:4], residual[3:4], weight, 1e-6)[0], out[3:4])
    assert_kernel_close(silu_mul(x), silu_mul_reference, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rope_kv_write_matches_the_reference(dtype, head_dim):
    from stepgraph.kernels.rope_kv import rope_kv_write, rope_kv_write_reference

    qkv = torch.randn(4, 3, 10 * head_dim, device="cuda").to(dtype)
    positions = torch.arange(12, device="cuda").view(4, 3)
    slots = torch.where(positions == 5, -1, positions + 16)
    rope, norm = torch.randn(40, head_dim, device="cuda"), torch.randn(head_dim, device="cuda").to(dtype)
    caches = [torch.zeros(3, 16, 2, head_dim, device="cuda", dtype=dtype) for _ in range(2)]

    def run(op):
        def call(qkv, rope, norm):
            written = [cache.to(qkv.dtype) for cache in caches]
            q = op(qkv, positions, rope, slots, *written, norm, norm, 6, 1e-6)
            return torch.cat([q.flatten(), written[0].flatten(), written[1].flatten()])

        return call

    assert_kernel_close(run(rope_kv_write)(qkv, rope, norm), run(rope_kv_write_reference), qkv, rope, norm)


def test_fp8_cache_matches_the_reference():
    from stepgraph.kernels.attention import uniform_decode_attention_reference
    from stepgraph.kernels.launch import target_of

    case = clean(attention_case(SHAPES[0], torch.bfloat16, 4))
    if target_of(case.q).arch < 89:
        pytest.skip("e4m3 needs sm_89")
    scales = torch.tensor([[0.5, 2.0], [1.5, 0.75]], device="cuda")
    fp8 = replace(case, k_cache=case.k_cache.to(torch.float8_e4m3fn), v_cache=case.v_cache.to(torch.float8_e4m3fn))
    out = attend(fp8, kv_scales=scales)

    def reference(q):
        return uniform_decode_attention_reference(q, *fp8.args[1:], kv_scales=scales)

    assert_kernel_close(out, reference, case.q)


SANITIZED = """
import torch
from stepgraph.kernels.attention.launcher import uniform_decode_attention_triton
from stepgraph.kernels.linear_triton import linear_triton
from stepgraph.kernels.testing import paged_case
for query_len, lengths in ((1, [17, 0]), (4, [600, 5])):
    case = paged_case(lengths, query_len=query_len, dtype=torch.bfloat16, device="cuda")
    uniform_decode_attention_triton(*case.args)
x = torch.randn(3, 200, device="cuda")
linear_triton(x, torch.randn(33, 200, device="cuda"), None)
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer_finds_nothing(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", SANITIZED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
