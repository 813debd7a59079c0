"""Memory for what every step reads: zeros of any shape, side by side for weights that are packed together."""

import itertools
import mmap

import pytest
import torch

from stepgraph.kernels.memory import LARGE_PAGE_BYTES, zeros
from stepgraph.kernels.packed import pack, packed_form


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0,), (3, 5), (3, LARGE_PAGE_BYTES)])
def test_zeros_are_zeros_that_can_be_written(shape, dtype):
    values = zeros(shape, dtype)
    assert values.shape == shape
    assert values.dtype == dtype
    assert values.device.type == "cpu"
    assert values.is_contiguous()
    assert not values.any()
    assert values.fill_(1).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="a system without large pages")
def test_what_fills_a_large_page_starts_with_one():
    values = zeros([LARGE_PAGE_BYTES], torch.uint8)
    assert values.data_ptr() % LARGE_PAGE_BYTES == 0


def test_a_system_without_large_pages_has_zeros_too(monkeypatch):
    monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    assert zeros([LARGE_PAGE_BYTES], torch.uint8).shape == (LARGE_PAGE_BYTES,)


def packable(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=generator) for shape in shapes]
    if not pack(torch.ones(1, 1)):
        pytest.skip("no compiled products on this machine")
    return weights


def test_weights_that_are_packed_together_lie_side_by_side_in_order():
    weights = packable((8, 64), (7, 50), (600, 1024))
    weights.insert(1, torch.randn(16, 64).bfloat16())
    assert pack(*weights)
    steps = [packed_form(weight).steps for weight in weights]
    for near, following in itertools.pairwise(steps):
        assert near.data_ptr() + near.nbytes == following.data_ptr()
        assert following.data_ptr() % 64 == 0
    for weight, each in zip(weights, steps, strict=True):
        whole = each.transpose(1, 2).flatten(0, 1).flatten(1)[: weight.shape[0]]
        assert not whole[:, weight.shape[1] :].any()
        assert each.shape[0] == -(-weight.shape[0] // 4)
        assert whole[:, : weight.shape[1]].sum() != 0
        assert each.dtype == weight.dtype


def test_of_several_only_what_can_be_is_packed_and_once():
    first, last = packable((8, 64), (8, 64))
    assert pack(first)
    before = packed_form(first)
    assert not pack(first, torch.ones(4, 4, dtype=torch.float64), last)
    assert packed_form(first) is before
    assert packed_form(last) is not None
    assert pack(first, last)
    assert pack()
