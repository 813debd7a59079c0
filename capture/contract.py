"""What a step may not do if it is to be one CUDA graph, and who did it: checked while the step is traced, on any machine.

A graph replays launches, nothing else. So a step may not read a tensor on the host, give a tensor a shape that depends on
data, take a tensor from the host, draw from a random generator (whose numbers would depend on the order of launches; see
`stepgraph.kernels.philox`) or keep a tensor that it made for the next step.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepgraph.capture import guards

aten = torch.ops.aten

HOST_READS = {aten._local_scalar_dense, aten.equal, aten.is_nonzero}
DATA_SHAPES = {
    aten.nonzero, aten.masked_select, aten.unique_consecutive, aten._unique2, aten.unique_dim, aten.bincount,
    aten.repeat_interleave,
}  # fmt: skip


class CaptureContractError(RuntimeError):
    """The step does something that no graph can hold; the message names the op and the source line."""


class CaptureContract(TorchDispatchMode):
    """Raises `CaptureContractError` at the first op that breaks the contract on `device`."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        fault = self._fault(func, args, kwargs)
        if fault is not None:
            raise CaptureContractError(f"{func} at {_caller()} {fault}")
        return func(*args, **kwargs)

    def _fault(self, func, args, kwargs) -> str | None:
        packet = func.overloadpacket
        if packet in HOST_READS:
            return "reads a tensor on the host"
        indexed_by_mask = packet in (aten.index, aten.index_put, aten.index_put_) and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if packet in DATA_SHAPES or indexed_by_mask:
            return "gives a tensor a shape that depends on data"
        if torch.Tag.nondeterministic_seeded in func.tags:
            return "draws from a random generator; a step's random numbers come from stepgraph.kernels.philox"
        if self.device.type != "cpu":
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
            # A scalar that PyTorch wraps is a launch argument; anything else would be copied over at each step, or once.
            if any(tensor.dim() > 0 for tensor in on_host) or (on_host and packet in (aten._to_copy, aten.copy_)):
                return "takes a tensor from the host (a Python list as an index is one, too)"
        return None


@contextmanager
def keeps_no_tensor(module: nn.Module) -> Iterator[None]:
    """Raises `CaptureContractError` when the module holds another tensor at the end than at the start."""
    before = _held_tensors(module)
    yield
    for name, tensor in _held_tensors(module).items():
        if before.get(name) is not tensor:
            raise CaptureContractError(
                f"the step keeps a tensor that it made itself, in {name}; only the state outlives a step"
            )


def _held_tensors(module: nn.Module) -> dict[str, Tensor]:
    held = dict(module.named_parameters()) | dict(module.named_buffers())
    for path, child in module.named_modules():
        for attribute, value in vars(child).items():
            if not attribute.startswith("_"):
                leaves = tree_leaves(value) if isinstance(value, list | tuple | dict) else [value]
                held |= {f"{path}.{attribute}[{i}]": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    return held


def _caller() -> str:
    """File and line of the innermost code that is neither PyTorch's nor the tracing's own."""
    skipped = (str(Path(torch.__file__).parent), __file__, guards.__file__, "<")
    ours = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(skipped)]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno} ({(ours[-1].line or '').strip()})"
