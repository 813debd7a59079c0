"""Paged KV cache: device storage, and the host's block allocator."""

import torch
from torch import Tensor, nn

from stepgraph.model.config import ModelConfig


class PagedKV(nn.Module):
    """Keys and values of every layer in blocks of `block_size` tokens. Block 0 is the null block: it belongs to no request.

    `storage [layers, 2, blocks, block_size, KV, D]`, zero at the start so that a read of an unwritten slot is finite.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ):
        super().__init__()
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.register_buffer("storage", torch.zeros(shape, dtype=dtype, device=device), persistent=False)

    @property
    def num_blocks(self) -> int:
        return self.storage.shape[2]

    @property
    def block_size(self) -> int:
        return self.storage.shape[3]

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """`(k_cache, v_cache)` of each layer, views of `[blocks, block_size, KV, D]`."""
        return [tuple(layer.unbind(0)) for layer in self.storage.unbind(0)]


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes one block takes over all layers, keys and values."""
    return config.num_layers * 2 * block_size * config.num_kv_heads * config.head_dim * dtype.itemsize


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than a request has reserved."""


class BlockAllocator:
    """Hands out block ids on the host. A request reserves its worst case when it is admitted and takes blocks as it grows,
    so that a running request never waits for memory.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}; at least 2 are needed, since block 0 is the null block")
        self.free = list(range(num_blocks - 1, 0, -1))
        self.capacity = num_blocks - 1
        self.reserved = 0  # promised to running requests and not taken yet

    @property
    def available(self) -> int:
        """Blocks that a new request may reserve."""
        return len(self.free) - self.reserved

    def reserve(self, count: int) -> bool:
        """Promise `count` blocks to a request; False when they are not there."""
        if count > self.available:
            return False
        self.reserved += count
        return True

    def take(self, count: int) -> list[int]:
        """Turn `count` reserved blocks into block ids."""
        if count > self.reserved:
            raise OutOfBlocks(f"{count} blocks asked for, {self.reserved} reserved")
        self.reserved -= count
        return [self.free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int], unused_reservation: int) -> None:
        """End a request: return its blocks and the part of its reservation that it never took."""
        self.free.extend(reversed(blocks))
        self.reserved -= unused_reservation
