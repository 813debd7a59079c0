"""Products with packed weights on the CPU: right, the same bits for any rows beside a row, and never of an old weight."""

import copy
import io
import pickle
import weakref

import pytest
import torch

from stepgraph.kernels.linear import TILE, linear, pack

# (outputs, inputs) of the embedded model's products and of its head's.
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (576, 1728), (960, 1152), (8192, 576)]


def packed_weight(outer: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.randn(outer, inner, generator=torch.Generator().manual_seed(0)).to(dtype)
    if not pack(weight):
        pytest.skip(f"this processor or build packs no {dtype}")
    return weight


def rows_of(count: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, inner, generator=torch.Generator().manual_seed(1)).to(dtype)


both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@both_dtypes
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("count", [1, 4, TILE, TILE + 1, 40])
def test_packed_product_is_right(dtype, invariant, count):
    weight, x, bias = packed_weight(96, 130, dtype), rows_of(count, 130, dtype), rows_of(1, 96, dtype)[0]
    out = linear(x, weight, bias, invariant)
    expected = x.double() @ weight.double().T + bias.double()
    size = x.double().abs() @ weight.double().abs().T + bias.double().abs()
    assert (out.dtype, out.shape) == (dtype, (count, 96))
    allowed = 130 * torch.finfo(torch.float32).eps * size + 2 * torch.finfo(dtype).eps * expected.abs()
    assert ((out.double() - expected).abs() <= allowed).all()


@both_dtypes
@pytest.mark.parametrize(("outer", "inner"), SHAPES)
def test_invariant_rows_have_the_same_bits_for_any_rows_beside_them(dtype, outer, inner):
    weight, x = packed_weight(outer, inner, dtype), rows_of(2 * TILE + 3, inner, dtype)
    alone = torch.cat([linear(row[None].clone(), weight, None, True) for row in x])
    for count in range(1, len(x) + 1):
        assert torch.equal(linear(x[:count], weight, None, True), alone[:count])
        assert torch.equal(linear(x[-count:], weight, None, True), alone[-count:])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear(x[order], weight, None, True), alone[order])
    assert torch.equal(linear(x[:16].view(4, 4, inner), weight, None, True), alone[:16].view(4, 4, outer))
    wide = torch.cat([x, x], 1)[:, :inner]  # rows that are not adjacent
    assert torch.equal(linear(wide, weight, None, True), alone)


def test_a_weight_changed_in_place_is_used_as_it_is_now():
    weight, x = packed_weight(16, 32, torch.float32), rows_of(3, 32, torch.float32)
    before = linear(x, weight, None, False)
    weight.mul_(2)
    assert torch.allclose(linear(x, weight, None, False), 2 * before)
    assert pack(weight)
    assert torch.allclose(linear(x, weight, None, False), 2 * before)


def test_no_rows_and_weights_that_are_not_packed():
    weight = packed_weight(16, 32, torch.float32)
    assert linear(torch.empty(0, 32), weight, None, True).shape == (0, 16)
    assert not pack(torch.ones(4, 4, dtype=torch.float64))
    assert not pack(torch.ones(4, 4, device="meta"))


def parameter(*shape: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(0)), requires_grad=False)
    if not pack(weight):
        pytest.skip("this processor or build packs no float32")
    return weight


@both_dtypes
@pytest.mark.parametrize("invariant", [False, True])
def test_a_bias_may_have_any_strides(dtype, invariant):
    weight, x = packed_weight(96, 32, dtype), rows_of(3, 32, dtype)
    for bias in (rows_of(1, 192, dtype)[0, ::2], rows_of(1, 1, dtype)[0].expand(96)):
        assert torch.equal(linear(x, weight, bias, invariant), linear(x, weight, bias.clone(), invariant))


@pytest.mark.parametrize("shape", [(16, 32), (8, 32)])
def test_a_weight_that_was_replaced_is_used_as_it_is_now(shape):
    weight, x = parameter(16, 32), rows_of(3, 32, torch.float32)
    before = weakref.ref(weight.packed.weight)
    weight.data = torch.ones(shape)
    assert torch.allclose(linear(x, weight, None, False), x @ torch.ones(shape).T, atol=1e-5)
    assert before() is None  # nothing keeps the old one


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_a_module_may_change_its_dtype(dtype):
    module = torch.nn.Module()
    module.weight = parameter(16, 32)
    module.to(dtype)
    x = rows_of(3, 32, dtype)
    assert torch.equal(linear(x, module.weight, None, False), torch.nn.functional.linear(x, module.weight))


def test_copies_and_files_are_of_the_weight_alone():
    weight, x, file = parameter(16, 32), rows_of(3, 32, torch.float32), io.BytesIO()
    torch.save({"weight": weight}, file)
    file.seek(0)
    plain = weight.detach()
    assert pack(plain)
    for copied in (torch.load(file)["weight"], pickle.loads(pickle.dumps(weight)), copy.deepcopy(weight), copy.deepcopy(plain)):
        assert torch.equal(copied, weight)
        assert torch.allclose(linear(x, copied, None, False), linear(x, weight, None, False), atol=1e-5)
        assert pack(copied)
        assert torch.equal(linear(x, copied, None, True), linear(x, weight, None, True))


@pytest.mark.filterwarnings("ignore:stepgraph..linear. an autograd kernel")
@pytest.mark.parametrize("learns", ["x", "weight", "bias"])
def test_gradients_are_those_of_a_weight_that_is_not_packed(learns):
    given = {"x": rows_of(3, 32, torch.float32), "weight": parameter(16, 32), "bias": rows_of(1, 16, torch.float32)[0]}
    given[learns].requires_grad_()
    linear(**given, invariant=False).square().sum().backward()
    found, given[learns].grad = given[learns].grad, None
    torch.nn.functional.linear(
        **{{"x": "input"}.get(name, name): value for name, value in given.items()}
    ).square().sum().backward()
    assert torch.allclose(found, given[learns].grad, rtol=1e-4, atol=1e-4)


def test_what_is_no_matrix_is_not_packed():
    assert not pack(torch.ones(4))
    assert not pack(torch.tensor(1.0))
