"""Norms, SwiGLU, RoPE + KV write and the invariant matrix product under the interpreter."""

import pytest
import torch

from stepgraph.kernels.activation import silu_mul_reference
from stepgraph.kernels.activation_triton import silu_mul_triton
from stepgraph.kernels.linear_triton import linear_triton
from stepgraph.kernels.norm import add_rms_norm_reference, rms_norm_reference
from stepgraph.kernels.norm_triton import add_rms_norm_triton, rms_norm_triton
from stepgraph.kernels.rope_kv import rope_kv_write_reference
from stepgraph.kernels.rope_kv_triton import rope_kv_write_triton
from stepgraph.kernels.testing import assert_kernel_close, assert_same_bits, guarded_allocations

FLOATS = (torch.float32, torch.float16)
# A power of two, one less than one, SmolLM2's hidden size, and a single element.
WIDTHS = (256, 255, 576, 1)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_match_float64(width, dtype):
    x, residual, weight = (
        randn(2, 3, width, dtype=dtype),
        randn(2, 3, width, dtype=dtype, seed=1),
        randn(width, dtype=dtype, seed=2),
    )
    with guarded_allocations():
        alone = rms_norm_triton(x, weight, 1e-6)
        fused, total = add_rms_norm_triton(x, residual, weight, 1e-6)
    assert_kernel_close(alone, rms_norm_reference, x, weight, 1e-6)
    assert_kernel_close(fused, add_rms_norm_reference, x, residual, weight, 1e-6, pick=lambda out: out[0])
    assert_same_bits(total, x + residual)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1024, 1030, 48])  # one block, a block and a bit, less than a block
def test_silu_mul_matches_float64(width, dtype):
    gate_up = 4 * randn(2, 2 * width, dtype=dtype)
    with guarded_allocations():
        out = silu_mul_triton(gate_up)
    assert_kernel_close(out, silu_mul_reference, gate_up)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_silu_mul_saturates_without_nan():
    out = silu_mul_triton(torch.tensor([[-1e4, 1e4, 0.0, 1.0, 1.0, 1.0]]))
    assert_same_bits(out, torch.tensor([[0.0, 1e4, 0.0]]))


def rope_case(head_dim, dtype, heads=6, kv_heads=2, blocks=5, block_size=16, index_dtype=torch.int64):
    qkv = randn(2, 3, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    positions = torch.tensor([[0, 1, 2], [40, 41, 999]], dtype=index_dtype)  # 999 lies beyond the table and is clamped
    rope = randn(50, head_dim, seed=1)
    slots = torch.tensor([[16, 17, -1], [47, 48, 79]], dtype=index_dtype)  # the first and last lane of blocks, and nowhere
    k_cache, v_cache = randn(2, blocks, block_size, kv_heads, head_dim, seed=2).to(dtype).unbind(0)
    return qkv, positions, rope, slots, k_cache, v_cache, heads


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 16])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
def test_rope_kv_write_matches_float64(head_dim, norms, dtype, index_dtype):
    qkv, positions, rope, slots, k_cache, v_cache, heads = rope_case(head_dim, dtype, index_dtype=index_dtype)
    q_norm, k_norm = (randn(head_dim, dtype=dtype, seed=s) for s in (3, 4)) if norms else (None, None)
    k_out, v_out = k_cache.clone(), v_cache.clone()
    with guarded_allocations():
        q = rope_kv_write_triton(qkv, positions, rope, slots, k_out, v_out, q_norm, k_norm, heads, 1e-6)

    def reference(qkv, rope, k_cache, v_cache, q_norm, k_norm, pick):
        k_cache, v_cache = k_cache.clone(), v_cache.clone()
        q = rope_kv_write_reference(qkv, positions.long(), rope, slots.long(), k_cache, v_cache, q_norm, k_norm, heads, 1e-6)
        return (q, k_cache, v_cache)[pick]

    args = (qkv, rope, k_cache, v_cache, q_norm, k_norm)
    for index, out in enumerate((q, k_out, v_out)):
        assert_kernel_close(out, reference, *args, index)
    untouched = torch.ones(k_out.shape[0] * k_out.shape[1], dtype=torch.bool)
    untouched[slots[slots >= 0].long()] = False
    for out, before in ((k_out, k_cache), (v_out, v_cache)):
        assert_same_bits(out.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])


def test_fp8_cache_is_scaled_and_clamped():
    qkv, positions, rope, slots, _, _, heads = rope_case(16, torch.float32)
    # Values that e4m3 holds exactly after the division: the interpreter loses the carry of a rounding into the exponent.
    qkv = qkv.mul(4).round().clamp(-14, 14) / 2
    qkv[0, 0, -1] = 1e6
    caches = [torch.zeros(5, 16, 2, 16).to(torch.float8_e4m3fn) for _ in range(4)]
    scales = torch.tensor([[1.0, 0.5], [0.25, 2.0]])
    rope[:, :8], rope[:, 8:] = 1.0, 0.0  # no rotation
    rope_kv_write_triton(qkv, positions, rope, slots, *caches[:2], None, None, heads, 1e-6, scales)
    rope_kv_write_reference(qkv, positions, rope, slots, *caches[2:], None, None, heads, 1e-6, scales)
    for actual, expected in zip(caches[:2], caches[2:], strict=True):
        assert_same_bits(actual.float(), expected.float())
    assert caches[1].float()[1, 0, 1, -1] == 448.0
    with pytest.raises(ValueError, match="kv_scales"):
        rope_kv_write_triton(qkv, positions, rope, slots, *caches[:2], None, None, heads, 1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("rows", "width", "depth", "bias"),
    [(5, 70, 200, True), (3, 130, 1024, True), (70, 33, 64, False), (1, 64, 2048, False)],
    ids=["ragged", "split-K", "two-row-tiles", "one-row"],
)
def test_linear_matches_float64(rows, width, depth, bias, dtype):
    x, weight = randn(rows, depth, dtype=dtype), randn(width, depth, dtype=dtype, seed=1) * depth**-0.5
    bias = randn(width, dtype=dtype, seed=2) if bias else None
    with guarded_allocations():
        out = linear_triton(x, weight, bias)
    assert_kernel_close(out, torch.nn.functional.linear, x, weight, bias)


def test_linear_with_strided_rows_and_bias():
    x, weight, bias = randn(3, 64), randn(20, 64, seed=1), randn(20, seed=2)
    spaced = [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in (x, bias)]
    assert_same_bits(linear_triton(spaced[0], weight, spaced[1]), linear_triton(x, weight, bias))


@pytest.mark.usefixtures("row_invariant_dot")
@pytest.mark.parametrize("dtype", FLOATS)
def test_linear_row_has_the_bits_of_a_one_row_call(dtype):
    x, weight = randn(66, 512, dtype=dtype), randn(20, 512, dtype=dtype, seed=1)
    out = linear_triton(x, weight, None)
    for row in (0, 1, 17, 63, 65):
        assert_same_bits(linear_triton(x[row : row + 1], weight, None), out[row : row + 1])


@pytest.mark.parametrize("operation", [lambda x: silu_mul_triton(x), lambda x: rms_norm_triton(x, x[0], 1e-6)])
def test_float64_is_refused(operation):
    with pytest.raises(ValueError, match="float64"):
        operation(torch.ones(2, 4, dtype=torch.float64))


def test_rows_are_independent_of_the_batch():
    x, residual, weight = randn(9, 576), randn(9, 576, seed=1), randn(576, seed=2)
    whole, _ = add_rms_norm_triton(x, residual, weight, 1e-6)
    for row in (0, 4, 8):
        one, _ = add_rms_norm_triton(x[row : row + 1], residual[row : row + 1], weight, 1e-6)
        assert_same_bits(one, whole[row : row + 1])
