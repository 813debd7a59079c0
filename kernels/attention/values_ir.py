"""The second inner loop of the CPU's attention, as LLVM code: values of keys, weighted, added to the sums of a few queries.

    totals[m, d] += Σ_s weights[m, s] · values[s, d]        m < queries

Every (m, d) takes its terms one after the other, so that its bits do not depend on the queries beside it, nor on how the keys
are shared out among calls. See `stepgraph.kernels.tile_ir` for the first loop, and for why LLVM.
"""

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from stepgraph.kernels.tile_ir import FLOAT_LANES, INT16, INT64, LANES, fused, widened_bits

VECTORS = 4  # of `LANES` dimensions at a time: with four queries, their sums fill half of the registers


@intrinsic(prefer_literal=True)
def add_weighted(typing_context, v_like, queries, vectors, weights_at, weights_apart, v_at, v_apart, count, totals_at, apart):
    """In a kernel: `queries` (1 .. 4, a constant) times `vectors * 16` dimensions (1 .. 4, a constant) over `count` keys.

    Args:
        v_like: what values are, `uint16` for bfloat16 or float32.
        queries, vectors: see above.
        weights_at, weights_apart: weight s of query m is a float32 at `weights_at + m * weights_apart + 4 s`.
        v_at, v_apart: values of key s start at `v_at + s * v_apart`.
        count: may be 0.
        totals_at, apart: sums of query m start at `totals_at + m * apart`; float32.
    """
    given, rows, parts = (v_like, queries, vectors), queries.literal_value, vectors.literal_value

    def generate(context, builder, signature, args):
        weights_at, weights_apart, v_at, v_apart, count, totals_at, apart = args[3:]
        narrow = v_like == types.uint16
        vector = ir.VectorType(INT16, LANES) if narrow else FLOAT_LANES
        before, loop, after = (builder.block, *(builder.append_basic_block(name) for name in ("keys", "done")))

        def constant(value):
            return ir.Constant(INT64, value)

        def pointer(address, kind):
            return builder.inttoptr(address, ir.PointerType(kind))

        def sum_at(row, part):
            return pointer(
                builder.add(totals_at, builder.add(builder.mul(apart, constant(row)), constant(64 * part))), FLOAT_LANES
            )

        places = [(row, part) for row in range(rows) for part in range(parts)]
        known = [builder.load(sum_at(*place), align=4) for place in places]
        first_weights = [builder.add(weights_at, builder.mul(weights_apart, constant(row))) for row in range(rows)]
        builder.cbranch(builder.icmp_signed(">", count, constant(0)), loop, after)

        builder.position_at_end(loop)
        number, totals = builder.phi(INT64), [builder.phi(FLOAT_LANES) for _ in places]
        value_at = builder.add(v_at, builder.mul(number, v_apart))
        values = [
            builder.load(pointer(builder.add(value_at, constant(part * LANES * (2 if narrow else 4))), vector), align=1)
            for part in range(parts)
        ]
        if narrow:
            values = [widened_bits(builder, value) for value in values]
        added = []
        for row in range(rows):
            weight_at = builder.add(first_weights[row], builder.mul(number, constant(4)))
            weight = builder.load(pointer(weight_at, ir.FloatType()), align=4)
            empty, lane = ir.Constant(FLOAT_LANES, ir.Undefined), ir.Constant(ir.IntType(32), 0)
            spread = builder.shuffle_vector(
                builder.insert_element(empty, weight, lane), empty, ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
            )
            added += [fused(builder, totals[row * parts + part], spread, values[part]) for part in range(parts)]
        following = builder.add(number, constant(1))
        for phi, first, next_one in zip([number, *totals], [constant(0), *known], [following, *added], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(next_one, loop)
        builder.cbranch(builder.icmp_signed("<", following, count), loop, after)

        builder.position_at_end(after)
        results = [builder.phi(FLOAT_LANES) for _ in places]
        for result, old, new in zip(results, known, added, strict=True):
            result.add_incoming(old, before)
            result.add_incoming(new, loop)
        for place, result in zip(places, results, strict=True):
            builder.store(result, sum_at(*place), align=4)
        return context.get_dummy_value()

    return types.void(*given, *[types.int64] * 7), generate
