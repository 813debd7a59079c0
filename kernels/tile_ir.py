"""The inner loop of the CPU's products, as LLVM code: a few rows of activations times four outputs of a packed weight.

    sums[m, n] = Σ_k x[m, k] · w[n, k]        m < rows, n < 4

Every (m, n) has an accumulator of 16 lanes that takes the steps of k in order and is folded in halves at the end. So the bits
of a row depend on nothing but the row and the weight: not on the rows beside it, nor on how many there are.

Numba compiles loops, but does not say which instruction multiplies; here it matters. What a step is follows from the types of
the operands (`x`, `w`):

| x | w | a step of k |
|---|---|---|
| float32 | float32 | 16 values, fused multiply-add |
| float32 | uint16 | 16 values of bfloat16, which are widened first |
| uint16 | uint16 | 32 values of bfloat16 in pairs, `vdpbf16ps` (AVX512-BF16), to which denormals are zero |
| uint8 | int8 | 64 values, `vpdpbusd` (VNNI) or what it does in small steps |
"""

from collections.abc import Callable, Sequence
from platform import machine
from typing import NamedTuple

import llvmlite.ir as ir
from numba import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from stepgraph.kernels.packed import OUTPUTS

LANES, LINE_BYTES = 16, 64
INT16, INT32, INT64 = (ir.IntType(bits) for bits in (16, 32, 64))
FLOAT_LANES, INT32_LANES = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(INT32, LANES)


class Step(NamedTuple):
    """How a step of k multiplies: how many values it takes, the vectors they are loaded as, what they are summed in, and code
    that adds the products of x and w to an accumulator.
    """

    values: int
    x: ir.VectorType
    w: ir.VectorType
    total: ir.VectorType
    add_products: Callable[[ir.IRBuilder, ir.Value, ir.Value, ir.Value], ir.Value]


def has(*features: str) -> bool:
    """Whether the processor that Numba compiles for has all of them, by LLVM's names."""
    # Numba's own answer: its settings may take some away from this processor, and LLVM ends the process at a missing one.
    found = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
    return all(f"+{feature}" in found for feature in features)


def fuses() -> bool:
    """Whether it multiplies and adds in one instruction; where it does not, LLVM calls a function for each lane."""
    return has("fma") or machine().lower() in ("arm64", "aarch64")


def _integers(values: Sequence[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(INT32, len(values)), list(values))


def _each(value: int) -> ir.Constant:
    return _integers([value] * LANES)


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
    module, kind = builder.module, ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(module.globals.get(name) or ir.Function(module, kind, name), args)


def _prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Into the second cache, to be read; what does not exist is not fetched, and is no error.

    Not into the first: the few misses that it keeps track of at a time are what loads then wait for.
    """
    pointer = builder.inttoptr(address, ir.PointerType(ir.IntType(8)))
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer, *(ir.Constant(INT32, value) for value in (0, 2, 1)))


def fused(builder, total, x, w):
    """`total + x * w`, rounded once."""
    return _call(builder, "llvm.fma.v16f32", total.type, x, w, total)


def widened_bits(builder, bits):
    """The bits of bfloat16 numbers, as float32."""
    return builder.bitcast(builder.shl(builder.zext(bits, INT32_LANES), _each(16)), FLOAT_LANES)


def _widened(builder, total, x, w):
    return fused(builder, total, x, widened_bits(builder, w))


def _bfloat_pairs(builder, total, x, w):
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, x, w)


def _bytes_512(builder, total, x, w):
    return _call(builder, "llvm.x86.avx512.vpdpbusd.512", total.type, total, x, w)


def _bytes_256(builder, total, x, w):
    """The two halves one after the other, for processors without the wide registers."""
    done = []
    for half in (range(LANES // 2), range(LANES // 2, LANES)):
        parts = [builder.shuffle_vector(each, each, _integers(half)) for each in (total, x, w)]
        done.append(_call(builder, "llvm.x86.avx512.vpdpbusd.256", parts[0].type, *parts))
    return builder.shuffle_vector(*done, _integers(range(LANES)))


def _bytes_one_by_one(builder, total, x, w):
    """Byte j of each lane, for j = 0 .. 3: without a sign in x, with one in w."""
    for byte in range(4):
        of_x = builder.and_(builder.lshr(x, _each(8 * byte)), _each(255))
        of_w = builder.ashr(builder.shl(w, _each(24 - 8 * byte)), _each(24))
        total = builder.add(total, builder.mul(of_x, of_w))
    return total


def step_of(x: types.Type, w: types.Type) -> Step:
    """The step for operands of these types, as fast as this processor has it."""
    if (x, w) == (types.uint8, types.int8):
        if has("avx512vnni"):
            way = _bytes_512
        else:
            way = _bytes_256 if has("avxvnni") else _bytes_one_by_one
        return Step(4 * LANES, INT32_LANES, INT32_LANES, INT32_LANES, way)
    if (x, w) == (types.uint16, types.uint16):
        return Step(2 * LANES, INT32_LANES, INT32_LANES, FLOAT_LANES, _bfloat_pairs)
    if (x, w) == (types.float32, types.uint16):
        return Step(LANES, FLOAT_LANES, ir.VectorType(INT16, LANES), FLOAT_LANES, _widened)
    return Step(LANES, FLOAT_LANES, FLOAT_LANES, FLOAT_LANES, fused)


def _folded(builder: ir.IRBuilder, totals: list[ir.Value], add: Callable) -> ir.Value:
    """The sums of the lanes of up to 16 accumulators, in the lanes of one vector, in order."""
    width = LANES
    while width > 1:
        half = width // 2
        low = [group + lane for group in range(0, LANES, width) for lane in range(half)]
        low += [LANES + lane for lane in low]
        parts = [_integers([lane + offset for lane in low]) for offset in (0, half)]
        totals += totals[-1:] * (len(totals) % 2)  # what fills up is not looked at
        totals = [
            add(*(builder.shuffle_vector(first, second, part) for part in parts))
            for first, second in zip(totals[::2], totals[1::2], strict=True)
        ]
        width = half
    return totals[0]


@intrinsic(prefer_literal=True)
def multiply_tile(typing_context, x_like, w_like, rows, fetches, in_turns, x_at, w_at, apart, fetch_at, sums_at, size, stride):
    """In a kernel: `rows` (1 .. 4, a constant) rows at `x_at`, of `size` values, a multiple of a step's, times four outputs,
    into `sums[m * stride + n]` at `sums_at`: float32, or int32 if bytes are multiplied. The outputs' values start at `w_at`,
    `apart` bytes from one output to the next, or if `in_turns` (0 or 1, a constant) their steps take turns.
    `fetches` (0 or 1, a constant): meanwhile half as many bytes as the weights have are fetched, from `fetch_at` on.
    """
    given = x_like, w_like, rows, fetches, in_turns
    count, fetches, in_turns = rows.literal_value, fetches.literal_value, in_turns.literal_value

    def generate(context, builder, signature, args):
        step = step_of(*signature.args[:2])
        x_at, w_at, apart, fetch_at, sums_at, size, stride = args[5:]
        x_bytes, w_bytes = (vector.get_abi_size(context.target_data) for vector in (step.x, step.w))
        before, loop, after = builder.block, builder.append_basic_block("steps"), builder.append_basic_block("fold")

        def constant(value):
            return ir.Constant(INT64, value)

        def load(address, vector, align):
            return builder.load(builder.inttoptr(address, ir.PointerType(vector)), align=align)

        steps = builder.udiv(size, constant(step.values))
        row_bytes = builder.mul(steps, constant(x_bytes))
        rows_at = [builder.add(x_at, builder.mul(row_bytes, constant(row))) for row in range(count)]
        builder.branch(loop)

        builder.position_at_end(loop)
        number, totals = builder.phi(INT64), [builder.phi(step.total) for _ in range(count * OUTPUTS)]
        step_at = builder.add(w_at, builder.mul(number, constant((OUTPUTS if in_turns else 1) * w_bytes)))
        for offset in range(0, OUTPUTS * w_bytes // 2 if fetches else 0, LINE_BYTES):
            from_at = builder.mul(number, constant(OUTPUTS * w_bytes // 2))
            _prefetch(builder, builder.add(builder.add(fetch_at, from_at), constant(offset)))
        steps_at = [
            builder.add(step_at, constant(output * w_bytes) if in_turns else builder.mul(apart, constant(output)))
            for output in range(OUTPUTS)
        ]
        weights = [load(output_at, step.w, w_bytes if in_turns else 1) for output_at in steps_at]
        x_offset, added = builder.mul(number, constant(x_bytes)), []
        for row, row_at in enumerate(rows_at):
            x = load(builder.add(row_at, x_offset), step.x, 1)
            for output, weight in enumerate(weights):
                added.append(step.add_products(builder, totals[row * OUTPUTS + output], x, weight))
        following = builder.add(number, constant(1))
        for phi, first, next_one in zip([number, *totals], [0] + [[0] * LANES] * len(totals), [following, *added], strict=True):
            phi.add_incoming(ir.Constant(phi.type, first), before)
            phi.add_incoming(next_one, loop)
        builder.cbranch(builder.icmp_unsigned("<", following, steps), loop, after)

        builder.position_at_end(after)
        sums = _folded(builder, added, builder.fadd if step.total == FLOAT_LANES else builder.add)
        for row in range(count):
            part = builder.shuffle_vector(sums, sums, _integers(range(row * OUTPUTS, (row + 1) * OUTPUTS)))
            at = builder.add(sums_at, builder.mul(stride, constant(4 * row)))
            builder.store(part, builder.inttoptr(at, ir.PointerType(part.type)), align=4)
        return context.get_dummy_value()

    return types.void(*given, *[types.int64] * 7), generate
