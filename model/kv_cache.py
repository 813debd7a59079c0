"""Paged KV cache: device storage."""

import torch
from torch import Tensor, nn

from stepgraph.kernels.memory import zeros
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
        on_cpu = torch.device(device).type == "cpu"
        storage = zeros(shape, dtype) if on_cpu else torch.zeros(shape, dtype=dtype, device=device)
        self.register_buffer("storage", storage, persistent=False)

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
