"""Which implementation runs, and that an explicit request never falls back."""

import os

import pytest
import torch

from stepgraph.kernels import registry
from stepgraph.kernels.norm import rms_norm, rms_norm_reference
from stepgraph.kernels.registry import NoImplementation, implementation, use_implementation, use_triton_on_cpu


@pytest.fixture
def scratch_op():
    op = registry.register(
        "test_scratch_op(Tensor x) -> Tensor", reference=lambda x: x + 1, cpu=lambda x: x + 2, fake=torch.empty_like
    )
    yield op
    del registry.IMPLEMENTATIONS["test_scratch_op"]


@pytest.fixture
def three_ways():
    op = registry.register(
        "test_three_ways(Tensor x) -> Tensor", reference=lambda x: x + 1, cpu=lambda x: x + 2, numba="math:does_not_exist",
        fake=torch.empty_like,
    )  # fmt: skip
    yield op
    del registry.IMPLEMENTATIONS["test_three_ways"]


def test_choice_on_the_cpu(three_ways, monkeypatch):
    """Numba's kernel, else the CPU's own, else the reference; an explicit request gets what it asks for."""
    x, ways = torch.zeros(1), registry.IMPLEMENTATIONS["test_three_ways"]
    monkeypatch.setitem(ways, "numba", lambda x: x + 3)
    assert three_ways(x) == 3
    with use_implementation("cpu"):
        assert three_ways(x) == 2
    with use_implementation("reference"):
        assert three_ways(x) == 1
    monkeypatch.delitem(ways, "numba")
    assert three_ways(x) == 2
    assert implementation("rms_norm", "reference") is rms_norm_reference


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter takes CPU tensors")
def test_a_triton_kernel_asked_for_on_the_cpu_says_what_it_needs():
    with use_triton_on_cpu(), pytest.raises(RuntimeError, match="only in a process started with TRITON_INTERPRET=1"):
        rms_norm(torch.randn(2, 8), torch.ones(8), 1e-6)


def test_explicit_request_never_falls_back(scratch_op):
    x = torch.zeros(1)
    assert scratch_op(x) == 2
    with use_implementation("reference"):
        assert scratch_op(x) == 1
    with use_implementation("triton"), pytest.raises(NoImplementation, match="test_scratch_op has no implementation 'triton'"):
        scratch_op(x)
    with use_implementation("triton", except_for=["test_scratch_op"]):
        assert scratch_op(x) == 2
    assert scratch_op(x) == 2
