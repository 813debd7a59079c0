"""What kernel tests, the tuner and the benchmarks check with: tolerances from data, guarded memory, paged inputs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CANARY = 1009.0  # exact in every float dtype of 10 bits or more, and in int32


def widen(value):
    """float64 copies of float tensors, everything else as it is."""
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def assert_kernel_close(
    actual: Tensor, reference: Callable, *args, band: float = 2.0, pick: Callable = lambda out: out
) -> None:
    """The kernel's error against float64 is at most twice that of the eager reference in its dtype, plus a rounding band;
    integers are equal.

    Args:
        actual: the kernel's output.
        reference: the op's specification; run once on `args` as they are and once in float64.
        band: in units of the dtype's epsilon times the largest exact value.
        pick: chooses the output to compare where the reference returns several.
    """
    eager = pick(reference(*args))
    if not eager.dtype.is_floating_point:
        assert torch.equal(actual, eager), f"{int((actual != eager).sum())} of {eager.numel()} values differ"
        return
    exact = pick(reference(*map(widen, args))).double()
    assert actual.shape == exact.shape, f"shape {tuple(actual.shape)}, reference {tuple(exact.shape)}"
    assert actual.dtype == eager.dtype, f"dtype {actual.dtype}, reference {eager.dtype}"
    assert actual.isfinite().all(), f"{int((~actual.isfinite()).sum())} values are not finite"
    error, eager_error = (actual.double() - exact).abs().max(), (eager.double() - exact).abs().max()
    allowed = 2 * eager_error + band * torch.finfo(actual.dtype).eps * exact.abs().max()
    assert error <= allowed, f"error {error:.3e} against float64; eager has {eager_error:.3e}, allowed is {allowed:.3e}"


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=False)


class _Guard(TorchFunctionMode):
    """Places every `empty` tensor between two stretches of canaries and poisons it."""

    NAMES = ("empty", "empty_like", "new_empty")
    MARGIN = 512  # elements; keeps the tensor as aligned as an allocation

    def __init__(self):
        super().__init__()
        self.buffers = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") not in self.NAMES or out.is_meta or out.numel() == 0:
            return out
        with torch._C.DisableTorchFunctionSubclass():
            buffer = torch.full((out.numel() + 2 * self.MARGIN,), CANARY, dtype=out.dtype, device=out.device)
            inside = buffer[self.MARGIN : self.MARGIN + out.numel()]
            inside.fill_(float("nan") if out.is_floating_point() else torch.iinfo(out.dtype).max)
        self.buffers.append(buffer)
        return inside.view(out.shape)


@contextmanager
def guarded_allocations() -> Iterator[None]:
    """Inside, `torch.empty` and its kin give poisoned memory between canaries; at the end no canary may have changed."""
    with _Guard() as guard:
        yield
    for buffer in guard.buffers:
        margins = torch.cat([buffer[: guard.MARGIN], buffer[-guard.MARGIN :]])
        assert (margins == CANARY).all(), (
            f"{int((margins != CANARY).sum())} elements written outside a {tuple(buffer.shape)} buffer"
        )


@dataclass
class PagedCase:
    """Inputs of one attention call over a scattered block table."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    scale: float
    window: int = 0
    softcap: float = 0.0

    @property
    def args(self) -> tuple:
        caches = (self.k_cache, self.v_cache, self.block_table, self.seq_lens)
        return (self.q, *caches, self.scale, self.window, self.softcap)


def paged_case(
    lengths: list[int],
    *,
    query_len: int = 1,
    group: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    index_dtype: torch.dtype = torch.int64,
) -> PagedCase:
    """Random inputs made in `dtype`; what no row may read (the null block, unused lanes, spare blocks) holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch, width = len(lengths), max(1, -(-max(lengths) // block_size))
    blocks = batch * width + 1
    table = (torch.randperm(blocks - 1, generator=generator) + 1).view(batch, width)
    shape = (blocks, block_size, kv_heads, head_dim)
    k_cache, v_cache = torch.randn(2, *shape, generator=generator).to(dtype).unbind(0)
    used = torch.zeros(blocks, block_size, dtype=torch.bool)
    position = torch.arange(width * block_size)
    for row, length in enumerate(lengths):
        live = position[position < length]
        used[table[row, live // block_size], live % block_size] = True
    k_cache, v_cache = (torch.where(used[:, :, None, None], cache, torch.nan) for cache in (k_cache, v_cache))
    q = torch.randn(batch, query_len, group * kv_heads, head_dim, generator=generator).to(dtype)
    tensors = (q, k_cache.contiguous(), v_cache.contiguous(), table.to(index_dtype), torch.tensor(lengths, dtype=index_dtype))
    return PagedCase(*(tensor.to(device) for tensor in tensors), head_dim**-0.5, window, softcap)
