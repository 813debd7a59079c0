"""Datasheet figures of the GPUs that a plan can be made for."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GPU:
    """Peak rates as the vendor states them; what a program reaches is less.

    Attributes:
        name: as on the command line.
        arch: compute capability × 10.
        bandwidth_bytes_per_s: of device memory.
        flops_16: dense fp16/bf16 tensor-core operations a second.
        flops_32: float32 operations a second outside the tensor cores.
        memory_bytes: of device memory.
        source: where the figures stand.
    """

    name: str
    arch: int
    bandwidth_bytes_per_s: float
    flops_16: float
    flops_32: float
    memory_bytes: float
    source: str

    def flops_per_s(self, dtype: torch.dtype) -> float:
        """Peak of matrix products in this dtype."""
        return self.flops_16 if dtype.itemsize == 2 else self.flops_32


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100", 80, 2.039e12, 312e12, 19.5e12, 80e9, "NVIDIA A100 Tensor Core GPU datasheet, 80GB SXM"),
        GPU("h100", 90, 3.35e12, 989e12, 67e12, 80e9, "NVIDIA H100 Tensor Core GPU datasheet, SXM, dense"),
        GPU("h200", 90, 4.8e12, 989e12, 67e12, 141e9, "NVIDIA H200 Tensor Core GPU datasheet, SXM, dense"),
        GPU("b200", 100, 8.0e12, 2250e12, 75e12, 180e9, "NVIDIA HGX B200 datasheet, an eighth of the board, dense"),
    )
}


def gpu_named(name: str) -> GPU:
    """The GPU called `name`; a ValueError that lists those there are."""
    if name not in GPUS:
        raise ValueError(f"gpu is {name!r}; allowed are {', '.join(GPUS)}")
    return GPUS[name]
