"""Kernel launches of a node: exact for the project's own ops, whose launchers are run and recorded; one for any other op."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.fx import Node

from stepgraph.capture.plan.costs import is_view, value_of
from stepgraph.kernels.launch import KNOWN_TARGETS, LaunchSpec, Target, record_launches
from stepgraph.kernels.registry import IMPLEMENTATIONS, implementation


class Launches:
    """Launches of nodes on one architecture. Nodes of equal shapes are recorded once.

    Attributes:
        specs: a `LaunchSpec` of each kernel variant met, by kernel name and a description of the variant.
    """

    def __init__(self, arch: int):
        self.target: Target = KNOWN_TARGETS[arch]
        self.specs: dict[str, LaunchSpec] = {}
        self._known: dict[str, int] = {}

    def count(self, node: Node) -> int:
        """Launches of the node on CUDA. A library's op counts as one, which its product or sort may exceed."""
        if is_view(node):
            return 0
        name = node.target._schema.name.removeprefix("stepgraph::")
        if name == node.target._schema.name or "triton" not in IMPLEMENTATIONS[name]:
            return 1
        arguments = torch.fx.node.map_arg(node.args, value_of)
        if name == "linear" and not arguments[3]:
            return 1  # the library's product, as `stepgraph.kernels.linear` chooses on CUDA
        key = f"{name}{list(_described(arguments))}"
        if key not in self._known:
            on_meta = [_to_meta(argument) for argument in arguments]
            with record_launches(self.target) as specs:
                implementation(name, "triton")(*on_meta)
            self._known[key] = len(specs)
            for spec in specs:
                self.specs.setdefault(spec.name, spec)
        return self._known[key]


def _to_meta(argument: object) -> object:
    if not isinstance(argument, Tensor):
        return argument
    return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="meta")


def _described(arguments: object) -> Iterator[object]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield (tuple(argument.shape), argument.stride(), argument.dtype)
        else:
            yield argument
