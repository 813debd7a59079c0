"""What a kernel launch is: the kernel, its grid, its arguments and its compile options, as one value.

A launcher builds `LaunchSpec`s and hands them to `launch`. The same specs, recorded instead of launched, are what the
compile gate compiles and what a plan counts, so that neither can drift from what runs: `record_launches` runs the launcher
itself on tensors without storage.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
import triton
from torch import Tensor
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, native_specialize_impl


@dataclass(frozen=True)
class Target:
    """The processor that a launch is shaped for.

    Attributes:
        arch: compute capability × 10 (90 for sm_90); 0 stands for the interpreter.
        num_sms: streaming multiprocessors, from which persistent grids are sized.
        shared_limit: bytes of shared memory that one program may use.
    """

    arch: int
    num_sms: int
    shared_limit: int


# A100, H100/H200, B200: multiprocessors of the full product, opt-in shared memory per block.
KNOWN_TARGETS = {
    80: Target(80, 108, 166_912),
    90: Target(90, 132, 232_448),
    100: Target(100, 148, 232_448),
}
INTERPRETER = Target(0, 2, 232_448)


@dataclass(frozen=True)
class LaunchSpec:
    """One kernel launch.

    Attributes:
        kernel: the `@triton.jit` function.
        grid: programs along each axis.
        args: run-time arguments by parameter name: tensors, ints, floats, None.
        constexprs: compile-time arguments by parameter name.
        num_warps, num_stages: as Triton takes them.
        enable_fp_fusion: let the compiler contract a multiply and an add; off, since two kernels (or two variants of one)
            that promise the same bits must round alike.
        deterministic: the kernel promises the same bits on each run, hence no atomics; the compile gate checks it.
    """

    kernel: JITFunction
    grid: tuple[int, ...]
    args: Mapping[str, object]
    constexprs: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 1
    enable_fp_fusion: bool = False
    deterministic: bool = True

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def options(self) -> dict[str, object]:
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": self.enable_fp_fusion,
        }

    def source(self) -> ASTSource:
        """What the JIT would compile for this launch: types, constants, what it specialises on (1, multiples of 16)."""
        bound = {**self.args, **self.constexprs}
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = bound[parameter.name]
            kind, key = "constexpr", None
            if not parameter.is_constexpr:
                argument = _Pointer(value) if isinstance(value, Tensor) else value
                align = not parameter.do_not_specialize_on_alignment
                specialize = not parameter.do_not_specialize
                kind, key = native_specialize_impl(BaseBackend, argument, parameter.is_const, specialize, align)
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[(index,)] = value
            elif isinstance(key, str) and key:
                attributes[(index,)] = BaseBackend.parse_attr(key)
        return ASTSource(self.kernel, signature, constants, attributes)

    def compile(self, target: Target):
        """Compile for `target`, with or without such a device."""
        return triton.compile(self.source(), target=GPUTarget("cuda", target.arch, 32), options=self.options)


class _Pointer:
    """Stands for a tensor's address where there is none: allocations are aligned, so the offset into one decides."""

    def __init__(self, tensor: Tensor):
        self.dtype, self.tensor = tensor.dtype, tensor

    def data_ptr(self) -> int:
        if self.tensor.is_meta or isinstance(self.tensor, torch._subclasses.FakeTensor):
            return self.tensor.storage_offset() * self.dtype.itemsize
        return self.tensor.data_ptr()


def dense(tensor: Tensor) -> Tensor:
    """The tensor, contiguous and aligned to 16 bytes; copied where it is not.

    The JIT compiles another variant for an unaligned pointer, whose sums may run in another order.
    """
    tensor = tensor.contiguous()
    return tensor if _Pointer(tensor).data_ptr() % 16 == 0 else tensor.clone()


def check_blocks(op: str, **caches: Tensor) -> None:
    """Raise unless each block of a cache `[blocks, block_size, KV, D]` is dense (blocks may lie apart)."""
    for name, blocks in caches.items():
        if not blocks[:1].is_contiguous():
            raise ValueError(f"{op}: the blocks of {name} must be contiguous; strides are {blocks.stride()}")


@dataclass(frozen=True)
class _Recorder:
    target: Target
    specs: list[LaunchSpec]


_RECORDER: ContextVar[_Recorder | None] = ContextVar("stepgraph_recorder", default=None)


@contextmanager
def record_launches(target: Target) -> Iterator[list[LaunchSpec]]:
    """Collect the launches made inside, shaped for `target`, instead of making them."""
    recorder = _Recorder(target, [])
    token = _RECORDER.set(recorder)
    try:
        yield recorder.specs
    finally:
        _RECORDER.reset(token)


def launch(spec: LaunchSpec) -> None:
    """Launch, or record when inside `record_launches`; an empty grid is no launch."""
    if prod(spec.grid) == 0:
        return
    recorder = _RECORDER.get()
    if recorder is not None:
        recorder.specs.append(spec)
        return
    if isinstance(spec.kernel, JITFunction) and not all(t.is_cuda for t in spec.args.values() if isinstance(t, Tensor)):
        raise RuntimeError(
            f"{spec.name} was given tensors that are not on a CUDA device; on the CPU, Triton kernels run only in a process "
            "started with TRITON_INTERPRET=1"
        )
    spec.kernel[spec.grid](**spec.args, **spec.constexprs, **spec.options)


def target_of(tensor: Tensor) -> Target:
    """The target of a launch on this tensor: the recorder's, the CUDA device's, or the interpreter."""
    recorder = _RECORDER.get()
    if recorder is not None:
        return recorder.target
    return _device_target(tensor.device.index or 0) if tensor.is_cuda else INTERPRETER


@cache
def _device_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    return Target(
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )


KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_kernel_dtype(op: str, *tensors: Tensor | None) -> None:
    """Raise where a Triton kernel was asked for with a dtype it is not written for (float64 above all)."""
    for tensor in tensors:
        if tensor is not None and tensor.dtype not in KERNEL_DTYPES:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in KERNEL_DTYPES)
            raise ValueError(f"{op}: the Triton kernel takes {names}, not {tensor.dtype}; the reference takes any float dtype")
