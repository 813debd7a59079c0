"""What the CPU kernels written with Numba share: tensors by address, bfloat16, and an exponential that vectorises.

Numba compiles a loop over numbers as it stands, so that an op that is a dozen PyTorch operators is one call. The compiled code
is kept (`stepgraph.kernels.jit`).
"""

from functools import partial

import llvmlite.ir as ir
import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np.arrayobj import carray
from torch import Tensor

from stepgraph.kernels.jit import jit

# NumPy has no bfloat16: its bits stand for it. A kernel gets one of these values, whose type says what its addresses point to.
ELEMENTS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
INT64, INT32, FLOAT32 = np.int64(0), np.int32(0), np.float32(0)  # the same for what they are whatever the dtype
# 1.5 · 2²³: the sum of a float32 and this is rounded to an integer, ties to even, which its low bits hold.
TO_INTEGER = np.float32(12582912.0)

# Sums may be reordered, which lets them run side by side. NaN and infinity keep their meaning.
kernel = partial(jit, fastmath={"reassoc", "contract", "nsz"})
# As written. Without the word, a function takes over the flags of the first kernel that calls it.
exact = partial(jit, fastmath=False)


def as_index(tensor: Tensor) -> Tensor:
    """An int64 or int32 tensor as kernels read it: int64, values side by side."""
    return tensor.to(torch.int64).contiguous()


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@intrinsic
def _ask(typing_context, address):
    """What the function `int()` at an address returns."""

    def generate(context, builder, signature, args):
        function = ir.PointerType(ir.FunctionType(ir.IntType(32), []))
        return builder.sext(builder.call(builder.inttoptr(args[0], function), []), ir.IntType(64))

    return types.int64(types.int64), generate


@exact
def thread_in_team(number_at, count_at):
    """Number of the thread that asks, and how many there are; see `stepgraph.kernels.openmp.run`."""
    return (_ask(number_at), _ask(count_at)) if count_at else (INT64, np.int64(1))


def array_at(address, shape, like):
    """In a kernel: the values at an address, side by side, of the type of `like`."""
    raise NotImplementedError("for kernels only")


@overload(array_at)
def _array_at(address, shape, like):
    dtype = getattr(np, like.name)
    return lambda address, shape, like: carray(_pointer(address), shape, dtype)


@exact
def address_of(array):
    """The address of an array, with which one can reckon: as Numba has it, without a sign, a sum with it is a float."""
    return np.int64(array.ctypes.data)


def wide(value):
    """In a kernel: an element as float32."""
    raise NotImplementedError("for kernels only")


@overload(wide, jit_options={"fastmath": False})
def _wide(value):
    if value == types.uint16:
        return lambda value: np.uint32(np.uint32(value) << np.uint32(16)).view(np.float32)
    return lambda value: value


def narrow(value, like):
    """In a kernel: a float32 as an element, rounded to nearest, ties to even."""
    raise NotImplementedError("for kernels only")


@overload(narrow, jit_options={"fastmath": False})
def _narrow(value, like):
    if like == types.uint16:

        def to_bfloat16(value, like):
            bits = np.float32(value).view(np.uint32)
            rounded = np.uint32(bits + np.uint32(0x7FFF) + np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1)))
            return np.uint16((rounded if value == value else np.uint32(0x7FC00000)) >> np.uint32(16))

        return to_bfloat16
    return lambda value, like: np.float32(value)


@exact
def exponential(x):
    """exp of a float32 up to 88, to 2 ulp; 0 below −87.3. NaN stays NaN.

    2^n · e^r with n = round(x / ln 2), and Cephes' polynomial for e^r (S. Moshier, `expf`).
    """
    x = np.float32(x)
    shifted = np.float32(x * np.float32(1.44269504088896341) + TO_INTEGER)
    n = shifted - TO_INTEGER
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    exponent = np.int32(shifted.view(np.int32) - np.int32(0x4B400000) + np.int32(127))
    value = p * np.int32(exponent << np.int32(23)).view(np.float32)
    return np.float32(0.0) if x < np.float32(-87.3) else value
