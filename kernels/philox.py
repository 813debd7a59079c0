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
    """Four words of 32 random bits, as int64 tensors of the broadcast shape of the arguments (int64, values below 2^32).

    On the CPU NumPy computes them: it has unsigned integers, and a step asks for few numbers by many small operations.
    """
    return (philox_numpy if all(t.is_cpu for t in (*counter, *key)) else philox_torch)(counter, key)


def philox_torch(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # An int64 product wraps modulo 2^64, so both halves of the unsigned product survive.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def philox_numpy(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    c0, c1, c2, c3 = (t.numpy() for t in torch.broadcast_tensors(*counter))
    even, odd = np.stack([c0, c2]).astype(np.uint64), np.stack([c1, c3]).astype(np.uint32)
    round_key = np.stack([t.numpy() for t in torch.broadcast_tensors(*key)]).astype(np.uint32)
    pair = (2,) + (1,) * max(c0.ndim, round_key.ndim - 1)
    multipliers, weyl = (
        np.array(pair_of, dtype).reshape(pair) for pair_of, dtype in ((_MULTIPLIERS, np.uint64), (_WEYL, np.uint32))
    )
    for _ in range(10):
        product = (even * multipliers)[::-1]
        even = (product >> np.uint64(32)).astype(np.uint32) ^ odd ^ round_key
        odd, even = product.astype(np.uint32), even.astype(np.uint64)
        round_key = round_key + weyl
    (c0, c2), (c1, c3) = even.astype(np.int64), odd.astype(np.int64)
    return tuple(torch.from_numpy(word) for word in (c0, c1, c2, c3))


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
    words = _lane_words(seed, position, base, stream, torch.arange(-(-size // 4), device=position.device))
    return _exponential_of(words.flatten(1)[:, :size])


def exponential_at(seed: Tensor, position: Tensor, base: Tensor, stream: Stream, entries: Tensor) -> Tensor:
    """`exponential(…)[:, entries]` for `[n]` int64 vocabulary entries, without the numbers of all the others."""
    words = _lane_words(seed, position, base, stream, entries // 4)
    return _exponential_of(words.gather(-1, (entries % 4).expand(len(seed), -1)[..., None])[..., 0])


def _lane_words(seed: Tensor, position: Tensor, base: Tensor, stream: Stream, lanes: Tensor) -> Tensor:
    """`[N, lanes, 4]` int64 words."""
    seed, position, base = (t[:, None] for t in (seed, position, base))
    return torch.stack(philox((lanes[None], position, base, torch.full_like(position, int(stream))), _split_seed(seed)), -1)


def _exponential_of(words: Tensor) -> Tensor:
    return -torch.log(1.0 - (words.to(torch.float64) + 0.5) * 2.0**-32)
