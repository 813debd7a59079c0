"""Guard-free tensor methods are the methods themselves."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stepgraph.capture.guards import GuardFree, get_item, set_item

INDICES = [
    3, -1, slice(1, 3), slice(None), (slice(None), 1), (slice(None, None, 2), slice(1, None)), None, ..., (..., 0),
    (..., None), (None, 2), (0, 1, 2), (slice(None), None, slice(0, 2)), (..., slice(0, 1), 1), torch.tensor([2, 0]),
    (torch.tensor([2, 0]), torch.tensor([1, 1])), (slice(None), torch.tensor([2, 0])), 
    (slice(0, 2), ..., torch.tensor([1])),
    (torch.tensor([2, 0]), slice(1, 3)), (torch.tensor([[2], [0]]), torch.tensor([1, 0])), (1, torch.tensor([0, 1])),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES)
def test_get_item(index):
    x = torch.arange(4 * 3 * 5).view(4, 3, 5)
    assert torch.equal(get_item(x, index), x[index])


@pytest.mark.parametrize("index", INDICES)
def test_set_item(index):
    for value in (7, torch.tensor(9)):
        ours, theirs = torch.arange(60).view(4, 3, 5), torch.arange(60).view(4, 3, 5)
        theirs[index] = value
        set_item(ours, index, value)
        assert torch.equal(ours, theirs)


def test_methods_work_on_fake_cuda_tensors():
    with FakeTensorMode(), GuardFree():
        x = torch.empty(4, 6, dtype=torch.int64, device="cuda")
        x[:, 0] = 1
        x.copy_(x + 1)
        assert x.expand(2, 4, 6).contiguous().stride() == (24, 6, 1)
        assert x.T.contiguous(memory_format=torch.contiguous_format).device.type == "cuda"


def test_cpu_tensors_are_left_alone():
    with GuardFree():
        assert torch.arange(5)[torch.tensor([True, False, True, False, False])].tolist() == [0, 2]
