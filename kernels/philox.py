"""Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011), keyed so that a token's noise belongs to its request.

Bit layout. The 64-bit key is the request's seed. The four 32-bit counter words are

    c0  vocabulary index / 4 (draws over the vocabulary), or 0 (one number)
    c1  absolute position of the token the number decides about
    c2  committed length of the request when the step began
    c3  stream: what the number is for

and word `vocabulary index % 4` of the output belongs to that vocabulary entry. c2 makes the numbers of two steps that look at
the same position independent, which verification over a whole block needs. Nothing here depends on a row's place in the
batch, on padding, or on whether a graph is replayed.
"""

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


class Stream(IntEnum):
    """What a number is for. Disjoint by construction: the stream is a counter word of its own."""

    DRAFT = 0  # the drafter's draw
    ACCEPT = 1  # the acceptance test of a draft
    TARGET = 2  # the recovered or bonus token


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of 32 random bits, as int64 tensors of the broadcast shape of the arguments (int64, values below 2^32)."""
    if all(word.device.type == "cpu" for word in (*counter, *key)):
        return _philox_numpy(counter, key)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # An int64 product wraps modulo 2^64, so both halves of the unsigned product survive.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _philox_numpy(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same words by NumPy, whose operators on small arrays cost a tenth of PyTorch's."""
    c0, c1, c2, c3, k0, k1 = (word.numpy().view(np.uint64) for word in (*counter, *key))
    mask, half = np.uint64(_MASK), np.uint64(32)
    m0, m1, w0, w1 = (np.uint64(value) for value in (*_MULTIPLIERS, *_WEYL))
    for _ in range(10):
        p0, p1 = c0 * m0, c2 * m1
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & mask, (p0 >> half) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + w0) & mask, (k1 + w1) & mask
    return tuple(torch.from_numpy(word.view(np.int64)) for word in (c0, c1, c2, c3))


def _split_seed(seed: Tensor) -> tuple[Tensor, Tensor]:
    return seed & _MASK, (seed >> 32) & _MASK


def uniform(seed: Tensor, position: Tensor, base: Tensor, stream: Stream) -> Tensor:
    """Uniform on the multiples of 2^−24 in [0, 1), float32, of the broadcast shape of the int64 arguments.

    1.0 cannot occur and every value is exact in float32.
    """
    word = philox((torch.zeros_like(position), position, base, torch.full_like(position, int(stream))), _split_seed(seed))[0]
    return (word >> 8).to(torch.float32) * 2.0**-24


def exponential(seed: Tensor, position: Tensor, base: Tensor, stream: Stream, size: int) -> Tensor:
    """`[N, size]` float64 draws of Exp(1) for `[N]` int64 arguments: E = −log(1 − u), u = (word + 1/2) 2^−32.

    Small values, which win races, have the finest resolution (2^−33); zero and infinity cannot occur.
    """
    seed, position, base = (t[:, None] for t in (seed, position, base))
    lanes = torch.arange(-(-size // 4), device=position.device)[None]
    words = philox((lanes, position, base, torch.full_like(position, int(stream))), _split_seed(seed))
    words = torch.stack(words, dim=-1).flatten(1)[:, :size]
    return -torch.log(1.0 - (words.to(torch.float64) + 0.5) * 2.0**-32)
