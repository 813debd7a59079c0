"""Products with int8 weights: the same bits whoever computes them, whatever rows are beside a row, and close to the exact."""

import math

import pytest
import torch

from stepgraph.kernels.linear import linear, linear_cpu, linear_reference
from stepgraph.kernels.linear_int8 import quantize_rows, quantize_weight
from stepgraph.kernels.packed import pack
from stepgraph.kernels.registry import NoImplementation, use_implementation

# (outputs, inputs) of the embedded model's products, and an odd one.
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (97, 131)]
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("shape", [(5, 64), (1, 1), (3, 1000)])
def test_a_weight_is_rounded_to_half_a_step(shape):
    weight = normal(*shape, seed=0)
    weight[0] = 0
    rounded, scale = quantize_weight(weight)
    assert (rounded.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (shape[0],))
    assert ((rounded * scale[:, None] - weight).abs() <= 0.5001 * scale[:, None]).all()
    assert rounded[1:].abs().amax(1).eq(127).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="weight has a value that is not finite"):
        quantize_weight(torch.tensor([[1.0, bad]]))


@both_dtypes
@pytest.mark.parametrize(("outer", "inner"), SHAPES)
@pytest.mark.parametrize("packed", [False, True])
def test_every_implementation_gives_the_bits_of_the_reference(dtype, outer, inner, packed):
    weight, scale = quantize_weight(normal(outer, inner, seed=0))
    if packed and not pack(weight):
        pytest.skip("this processor has no exact 8-bit products")
    x = normal(19, inner, seed=1, dtype=dtype) * torch.logspace(-6, 4, 19)[:, None].to(dtype)
    x[3] = 0
    for bias in (None, normal(outer, seed=2, dtype=dtype)):
        expected = linear_reference(x, weight, bias, False, scale)
        assert expected.dtype == dtype
        for count in (1, 2, 8, 9, 19):
            for function in (linear, linear_cpu):
                assert torch.equal(function(x[:count], weight, bias, False, scale), expected[:count])
                assert torch.equal(function(x[-count:], weight, bias, True, scale), expected[-count:])
        assert torch.equal(linear(x[None, ::2], weight, bias, False, scale), expected[None, ::2])


@both_dtypes
def test_product_is_close_to_the_exact_one(dtype):
    """Each factor is off by half a step at most."""
    weight, x = normal(40, 300, seed=0), normal(7, 300, seed=1, dtype=dtype)
    rounded, scale = quantize_weight(weight)
    steps, row_scale = quantize_rows(x)
    out, exact = linear(x, rounded, None, False, scale).double(), x.double() @ weight.double().T
    half = 0.5001 * (row_scale.double() * weight.abs().sum(1).double() + scale.double() * x.abs().sum(1, keepdim=True).double())
    allowed = half + 300 * 0.26 * row_scale.double() * scale.double() + torch.finfo(dtype).eps * exact.abs()
    assert ((out - exact).abs() <= allowed).all()
    assert steps.abs().amax(1).eq(127).all()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_stays_alone(bad, packed):
    weight, scale = quantize_weight(normal(6, 10, seed=0))
    if packed:
        pack(weight)
    x = normal(3, 10, seed=1)
    clean = linear(x, weight, None, False, scale)
    x[1, 4] = bad
    out = linear(x, weight, None, False, scale)
    assert not out[1].isfinite().any()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def test_weights_and_scales_may_have_gaps():
    weight, scale = quantize_weight(normal(16, 64, seed=0))
    x, bias = normal(3, 64, seed=1), normal(16, seed=2)
    expected = linear_reference(x, weight, bias, False, scale)
    scale, bias = (torch.stack([each, torch.full_like(each, 99.0)], 1)[:, 0] for each in (scale, bias))
    for given in (weight, weight.t().contiguous().t(), torch.cat([weight, weight], 1)[:, :64]):
        pack(given)
        for function in (linear, linear_cpu):
            assert torch.equal(function(x, given, bias, False, scale), expected)


def test_a_weight_without_inputs_is_refused():
    with pytest.raises(ValueError, match=r"linear: weight is \[3, 0\]; allowed is \[N, K\] with K ≥ 1"):
        linear(torch.ones(2, 0), torch.ones(3, 0, dtype=torch.int8), None, False, torch.ones(3))


def test_no_rows():
    weight, scale = quantize_weight(normal(6, 10, seed=0))
    pack(weight)
    assert linear(torch.empty(2, 0, 10), weight, None, False, scale).shape == (2, 0, 6)


def test_no_triton_kernel_is_pretended():
    weight, scale = quantize_weight(normal(6, 10, seed=0))
    with use_implementation("triton"), pytest.raises(NoImplementation, match="linear has no Triton kernel for int8 weights"):
        linear(torch.ones(1, 10), weight, None, False, scale)
