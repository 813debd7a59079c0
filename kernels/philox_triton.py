"""The numbers of `stepgraph.kernels.philox` inside Triton kernels, bit for bit."""

import triton
import triton.language as tl


@triton.jit
def words_at(seed, position, base, stream, lane):
    """Four words of 32 bits for each `lane` (counter word c0); int64 `seed`, `position`, `base` are scalars or of its shape."""
    c0 = lane.to(tl.uint32)
    zero = c0 * 0
    mask = 0xFFFFFFFF
    c1 = zero + (position & mask).to(tl.uint32)
    c2 = zero + (base & mask).to(tl.uint32)
    c3 = zero + stream
    return tl.philox(seed, c0, c1, c2, c3)


@triton.jit
def uniform_at(seed, position, base, stream):
    """A float32 on the multiples of 2^−24 in [0, 1) for each entry of int64 `seed`, `position`, `base` of one shape `[n]`."""
    word, _, _, _ = words_at(seed, position, base, stream, seed * 0)
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def exponential_at(seed, position, base, stream, start, BLOCK: tl.constexpr):
    """`[BLOCK]` float64 draws of Exp(1) for vocabulary entries `start ..`; `start` and BLOCK are multiples of 4."""
    lanes = start // 4 + tl.arange(0, BLOCK // 4)
    w0, w1, w2, w3 = words_at(seed, position, base, stream, lanes)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # entry 4 l + w has word w of lane l
    # 1 − u is exact in float64, so that the logarithm loses nothing where u is small.
    return -tl.log(1.0 - (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10)
