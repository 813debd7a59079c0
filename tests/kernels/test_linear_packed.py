"""Products with packed weights on the CPU: right, the same bits for any rows beside a row, and never of an old weight."""

import copy
import io
import os
import pickle
import re
import subprocess
import sys
import weakref
from pathlib import Path
from platform import machine

import pytest
import torch

from stepgraph.kernels import openmp
from stepgraph.kernels.linear import linear, linear_reference
from stepgraph.kernels.linear_int8 import quantize_weight
from stepgraph.kernels.packed import pack, packed_form

product_numba = pytest.importorskip("stepgraph.kernels.product_numba", reason="Numba is not installed")
has = pytest.importorskip("stepgraph.kernels.tile_ir").has

# (outputs, inputs) of the embedded model's products and of its head's.
SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536), (576, 1728), (960, 1152), (8192, 576)]


def packed_weight(outer: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    weight = torch.randn(outer, inner, generator=torch.Generator().manual_seed(0)).to(dtype)
    if not pack(weight):
        pytest.skip(f"no product is compiled for {dtype} here")
    return weight


def rows_of(count: int, inner: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, inner, generator=torch.Generator().manual_seed(1)).to(dtype)


both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@both_dtypes
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("count", [1, 4, 8, 8 + 1, 40])
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
    weight, x = packed_weight(outer, inner, dtype), rows_of(2 * 8 + 3, inner, dtype)
    alone = torch.cat([linear(row[None].clone(), weight, None, True) for row in x])
    for count in range(1, len(x) + 1):
        assert torch.equal(linear(x[:count], weight, None, True), alone[:count])
        assert torch.equal(linear(x[-count:], weight, None, True), alone[-count:])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear(x[order], weight, None, True), alone[order])
    assert torch.equal(linear(x[:16].view(4, 4, inner), weight, None, True), alone[:16].view(4, 4, outer))
    wide = torch.cat([x, x], 1)[:, :inner]  # rows that are not adjacent
    assert torch.equal(linear(wide, weight, None, True), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_threads_do_not_change_bits(dtype, monkeypatch):
    """In PyTorch's threads, more of them than there are outputs, and where it has none that we know."""
    weight, scale = torch.randn(3072, 200, generator=torch.Generator().manual_seed(0)), None
    weight, scale = quantize_weight(weight) if dtype == torch.int8 else (weight.to(dtype), None)
    if not pack(weight):
        pytest.skip(f"no product is compiled for {dtype} here")
    assert packed_form(weight).steps.nbytes > product_numba.ALONE_BYTES
    x, threads = rows_of(11, 200, torch.float32 if dtype == torch.int8 else dtype), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = linear(x, weight, None, False, scale)
        for number in (2, 3, 64):
            torch.set_num_threads(number)
            assert torch.equal(linear(x, weight, None, False, scale), alone)
        monkeypatch.setattr(openmp, "team", lambda: None)
        assert torch.equal(linear(x, weight, None, False, scale), alone)
    finally:
        torch.set_num_threads(threads)


def test_matrix_units_get_many_rows_unless_they_shall_be_invariant(monkeypatch):
    monkeypatch.setattr("stepgraph.kernels.linear_numba.MATRIX_ROWS", 4)
    products = []
    monkeypatch.setattr("stepgraph.kernels.linear_numba.multiply", lambda *given: products.append(len(given[0])))
    weight = packed_weight(8, 32, torch.bfloat16)
    for count in (3, 4):
        for invariant in (False, True):
            linear(rows_of(count, 32, torch.bfloat16), weight, None, invariant)
    assert products == [3, 3, 4]


@both_dtypes
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_in_its_row_and_output(dtype, bad):
    weight, x = packed_weight(7, 50, dtype), rows_of(6, 50, dtype)
    clean = linear(x, weight, None, False)
    spoilt = x.clone()
    spoilt[2, 49] = bad
    out = linear(spoilt, weight, None, False)
    assert not out[2].isfinite().any()
    assert torch.equal(out[[0, 1, 3, 4, 5]], clean[[0, 1, 3, 4, 5]])
    weight[3, 0] = bad
    assert pack(weight)
    out = linear(x, weight, None, False)
    assert not out[:, 3].isfinite().any()
    assert torch.equal(out[:, [0, 1, 2, 4, 5, 6]], clean[:, [0, 1, 2, 4, 5, 6]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (2, 3), (5, 64), (4, 65), (131, 31), (129, 96)])
def test_odd_shapes(dtype, outer, inner):
    weight, scale = torch.randint(-9, 10, (outer, inner), generator=torch.Generator().manual_seed(0)).to(dtype), None
    if not pack(weight):
        pytest.skip(f"no product is compiled for {dtype} here")
    of_x = torch.float32 if dtype == torch.int8 else dtype
    if dtype == torch.int8:
        scale = torch.full((outer,), 0.5)
    for count in (1, 2, 3, 4, 5, 6, 7, 9, 259):
        x = torch.randint(-9, 10, (count, inner), generator=torch.Generator().manual_seed(count)).to(of_x)
        out = linear(x, weight, None, False, scale)
        if dtype == torch.int8:
            assert torch.equal(out, linear_reference(x, weight, None, False, scale))
        else:  # small integers: every sum is exact
            assert torch.equal(out, (x.double() @ weight.double().T).to(dtype))


@pytest.mark.skipif(not has("avx2", "fma"), reason="an AVX2 processor's code")
def test_on_a_processor_with_less(tmp_path):
    """The same tests with code for AVX2 alone: other steps of bfloat16 and int8, one row in a tile."""
    fewer = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+sse4.2,+avx,+avx2,+fma", "NUMBA_CACHE_DIR": str(tmp_path)}
    tests = [f"{Path(__file__).with_name(name)}" for name in ("test_linear_packed.py", "test_linear_int8.py")]
    chosen = "odd_shapes or beside_them and 576 or threads or implementation and 131"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *tests]
    done = subprocess.run(command, env=os.environ | fewer, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout


@pytest.mark.parametrize("setting", ["NUMBA_CPU_NAME=generic", "NUMBA_ENABLE_AVX=0"])
def test_settings_that_take_instructions_away(setting, tmp_path):
    """Less is compiled then, or nothing; the product is right in any case."""
    script = (
        "import torch; from stepgraph.kernels.linear import linear; from stepgraph.kernels.packed import pack\n"
        "for dtype in (torch.float32, torch.bfloat16):\n"
        "    weight, x = torch.ones(5, 40, dtype=dtype), torch.ones(3, 40, dtype=dtype)\n"
        "    pack(weight)\n"
        "    assert (linear(x, weight, None, False) == 40).all()\n"
    )
    settings = {"NUMBA_CACHE_DIR": str(tmp_path)} | dict([setting.split("=")])
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | settings, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(machine().lower() not in ("x86_64", "amd64"), reason="x86 code")
def test_half_registers_have_their_instruction(tmp_path):
    """Processors with VNNI and without AVX-512: compiled here, run there."""
    script = (
        "import numpy as np; from stepgraph.kernels.product_numba import _body;"
        "print(_body(np.uint8, np.int8, np.float32)._library.get_asm_str())"
    )
    fewer = {"NUMBA_CPU_NAME": "alderlake", "NUMBA_CPU_FEATURES": "+avx2,+fma,+avxvnni", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | fewer, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"vpdpbusd\s.*%ymm", done.stdout)
    assert "zmm" not in done.stdout


def test_a_weight_changed_in_place_is_used_as_it_is_now():
    weight, x = packed_weight(16, 32, torch.float32), rows_of(3, 32, torch.float32)
    before = linear(x, weight, None, False)
    weight.mul_(2)
    assert torch.allclose(linear(x, weight, None, False), 2 * before)
    assert pack(weight)
    assert torch.allclose(linear(x, weight, None, False), 2 * before)


def test_a_shallow_copy_of_a_changed_weight_is_used_as_it_is_now():
    weight, x = parameter(16, 32), rows_of(3, 32, torch.float32)
    before, shallow = linear(x, weight, None, False), copy.copy(weight)
    weight.mul_(2)
    assert torch.allclose(linear(x, shallow, None, False), 2 * before)


def test_an_inference_tensor_is_not_packed():
    """Torch does not count its changes."""
    x, plain = rows_of(3, 32, torch.float32), packed_weight(16, 32, torch.float32)
    with torch.inference_mode():
        made, shallow = torch.ones(16, 32), copy.copy(plain)
        for weight in (made, shallow):
            assert weight.is_inference() != pack(weight)
            weight.mul_(2)
            assert torch.allclose(linear(x, weight, None, False), x @ weight.T, atol=1e-5)


@pytest.mark.parametrize("extreme", [-128, 127])
def test_int8_sums_that_outgrow_int32(extreme):
    weight, scale = torch.full((2, 132104), extreme, dtype=torch.int8), torch.ones(2)
    longer = torch.full((2, 132105), extreme, dtype=torch.int8)
    assert not pack(longer)
    pack(weight)
    for given in (weight, longer):
        for x in (torch.ones(1, given.shape[1]), -torch.ones(1, given.shape[1])):
            assert torch.equal(linear(x, given, None, False, scale), linear_reference(x, given, None, False, scale))


def test_no_rows_and_weights_that_are_not_packed():
    weight = packed_weight(16, 32, torch.float32)
    assert linear(torch.empty(0, 32), weight, None, True).shape == (0, 16)
    assert not pack(torch.ones(4, 4, dtype=torch.float64))
    assert not pack(torch.ones(4, 4, device="meta"))


def parameter(*shape: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(0)), requires_grad=False)
    if not pack(weight):
        pytest.skip("no product is compiled here")
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
    before = weakref.ref(weight.packed.steps)
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
