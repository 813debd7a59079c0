"""CPU kernels written with Numba: what they share, and ops where Numba is missing."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from stepgraph.kernels import jit
from stepgraph.kernels.activation import silu_mul
from stepgraph.kernels.attention import uniform_decode_attention
from stepgraph.kernels.norm import add_rms_norm, rms_norm
from stepgraph.kernels.registry import use_implementation
from stepgraph.kernels.rope_kv import rope_kv_write

support = pytest.importorskip("stepgraph.kernels.numba_support", reason="Numba is not installed")


@support.kernel
def _exponentials(x, out):
    for i in range(len(x)):
        out[i] = support.exponential(x[i])


@support.kernel
def _round_trip(x, out, element):
    for i in range(len(x)):
        out[i] = support.wide(support.narrow(x[i], element))


def test_exponential_is_within_two_ulp_inside_a_kernel_that_may_reorder():
    x = np.linspace(-87.0, 88.0, 200_001).astype(np.float32)
    out = np.empty_like(x)
    _exponentials(x, out)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(out - exact) <= 2 * np.finfo(np.float32).eps * exact).all()


def test_exponential_at_the_ends():
    x = np.array([-np.inf, -1e30, -100.0, 0.0, np.nan], dtype=np.float32)
    out = np.empty_like(x)
    _exponentials(x, out)
    assert out[:4].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert np.isnan(out[4])


def test_bfloat16_is_rounded_as_torch_rounds_it():
    """Every bit pattern of a bfloat16 with every kind of tail, below, at and above half: values even and odd, NaN, infinity."""
    patterns = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    bits = (patterns | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)).ravel()
    x = bits.view(np.float32)
    out = np.empty_like(x)
    _round_trip(x, out, support.ELEMENTS[torch.bfloat16])
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(out, expected)


def _attend(q):
    cache = torch.linspace(-1, 1, 48).view(3, 4, 1, 4)
    return uniform_decode_attention(q.view(1, 2, 2, 4), cache, cache, torch.tensor([[1, 2]]), torch.tensor([6]), 0.5, 0, 0.0)


def _rotate(qkv):
    caches, rope = [torch.zeros(3, 4, 1, 4) for _ in range(2)], torch.linspace(-1, 1, 36).view(9, 4)
    where = torch.tensor([[3, 4]])
    return rope_kv_write(qkv.view(1, 2, 16), where, rope, where, *caches, None, None, 2, 1e-5)


@pytest.mark.filterwarnings("ignore:stepgraph.* an autograd kernel")
@pytest.mark.parametrize(
    ("op", "size"),
    [
        (silu_mul, 16),
        (lambda x: rms_norm(x, torch.ones(16), 1e-5), 16),
        (lambda x: add_rms_norm(x, x, torch.ones(16), 1e-5)[0], 16),
        (_attend, 16),
        (_rotate, 32),
    ],
    ids=["silu_mul", "rms_norm", "add_rms_norm", "attention", "rope_kv_write"],
)
def test_gradients_reach_the_inputs(op, size):
    """Compiled code has none: PyTorch's operators stand in."""
    given = torch.randn(size, generator=torch.Generator().manual_seed(0))
    gradients = []
    for which in (None, "reference"):
        x = given.clone().requires_grad_()
        with use_implementation(which) if which else nullcontext():
            op(x).square().sum().backward()
        gradients.append(x.grad)
    assert gradients[0] is not None
    torch.testing.assert_close(*gradients)


def test_ops_run_without_numba():
    """The machine of a GPU may not have it. Contracts are the same; nothing is said, since nothing is wrong."""
    code = """
import sys, warnings
sys.modules["numba"] = None
warnings.simplefilter("error")
import torch
from stepgraph.kernels.activation import silu_mul, silu_mul_reference
from stepgraph.kernels.linear import linear, linear_cpu
from stepgraph.kernels.norm import rms_norm, rms_norm_reference
from stepgraph.kernels.packed import pack
from stepgraph.kernels.registry import implementation_on_cpu
x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
assert torch.equal(silu_mul(x), silu_mul_reference(x))
assert torch.equal(rms_norm(x, x[0], 1e-5), rms_norm_reference(x, x[0], 1e-5))
assert implementation_on_cpu(rms_norm) is rms_norm_reference
assert not pack(x)
assert torch.equal(linear(x, x, None, False), linear_cpu(x, x, None, False))
"""
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_a_numba_that_cannot_be_imported_is_said_once():
    """A package at odds with the NumPy beside it raises an ImportError of its own."""
    code = """
import sys, types, warnings
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "numba":
            raise ImportError("Numba needs NumPy 2.4 or less")
sys.meta_path.insert(0, Broken())
import torch
from stepgraph.kernels.norm import rms_norm
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)
    rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)
assert [str(each.message) for each in said] == ["rms_norm runs without Numba: Numba needs NumPy 2.4 or less"], said
"""
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_a_numba_that_shall_not_compile_is_as_good_as_none():
    code = """
import torch
from stepgraph.kernels.jit import compiled
from stepgraph.kernels.norm import rms_norm
from stepgraph.kernels.packed import pack
assert rms_norm(torch.ones(2, 4), torch.ones(4), 0.0).eq(1).all()
assert compiled(lambda x: x + 1)(1) == 2
assert not pack(torch.ones(2, 4))
"""
    settings = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    ran = subprocess.run([sys.executable, "-P", "-c", code], env=settings, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "rms_norm runs without Numba: NUMBA_DISABLE_JIT is set" in ran.stderr


def test_where_no_folder_can_be_written_code_is_compiled_and_not_kept():
    """A read-only image without a home."""
    code = """
from numba.core import caching
def refuse(self):
    raise OSError("read-only file system")
for name in dir(caching):
    if name.endswith("Locator"):
        getattr(caching, name).ensure_cache_path = refuse
import torch
from stepgraph.kernels.jit import compiled
from stepgraph.kernels.norm import rms_norm
assert compiled(lambda x: x + 1)(1) == 2
assert rms_norm(torch.ones(2, 4), torch.ones(4), 0.0).eq(1).all()
"""
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_kept_code_is_of_the_sources_as_they_are(tmp_path):
    """Also of those that a kernel only calls into: Numba itself looks at the kernel's own file alone."""
    (tmp_path / "below").mkdir()
    for name in ("a.py", "below/b.py"):
        (tmp_path / name).write_text("x = 1\n")
    first = jit.sources_stamp(tmp_path)
    assert jit.sources_stamp(tmp_path) == first
    (tmp_path / "below/b.py").write_text("x = 22\n")
    assert jit.sources_stamp(tmp_path) != first
    here = jit.sources_stamp(Path(jit.__file__).parent)
    assert support.exponential._cache._cache_file._source_stamp[1] == here
