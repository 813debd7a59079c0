"""Forward passes over whole texts side by side, for training.

The paged ops of `stepgraph.kernels` keep each row's bits free of its neighbours and have no gradient. Here neither is wanted;
the same weights give the same numbers up to rounding (`tests/model/test_training.py`).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from stepgraph.kernels.rope_kv import rotate_reference
from stepgraph.model.config import ModelConfig
from stepgraph.model.transformer import Transformer


def split_heads(qkv: Tensor, config: ModelConfig) -> list[Tensor]:
    """`[B, Q, (H + 2 KV) D]` -> q `[B, Q, H, D]`, k and v `[B, Q, KV, D]`."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    return list(qkv.view(*qkv.shape[:2], -1, config.head_dim).split([heads, kv_heads, kv_heads], dim=2))


def attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Grouped-query attention: q `[B, Q, H, D]`, keys and values `[B, KV, S, D]`, visible bool `[B or 1, Q, S]`
    -> `[B, Q, H D]`. The query heads that share a key head become further queries of it, so that no key is repeated.
    """
    batch, query_len, heads, head_dim = q.shape
    group = heads // keys.shape[1]
    grouped = q.view(batch, query_len, -1, group, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, KV, G Q, D]
    mask = visible[:, None].repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return out.view(batch, -1, group, query_len, head_dim).permute(0, 3, 1, 2, 4).flatten(2)


def target_forward(target: Transformer, tokens: Tensor, feature_layers: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
    """Final-normed hidden states `[B, Q, hidden]` and features `[B, Q, hidden * layers]` (None where none are asked for).

    Args:
        target: the model.
        tokens: `[B, Q]` int64, texts from their start; what a text is filled up with comes last and changes nothing before it.
        feature_layers: see `Transformer.hidden_and_features`.
    """
    config, eps, width = target.config, target.config.rms_norm_eps, (target.config.hidden_size,)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    x, streams = F.embedding(tokens, target.embed), {}
    for index, layer in enumerate(target.layers):
        if index in feature_layers:
            streams[index] = x
        visible = positions <= positions[..., None]
        if layer.window > 0:
            visible = visible & (positions > positions[..., None] - layer.window)
        q, k, v = split_heads(F.linear(F.rms_norm(x, width, layer.input_norm, eps), layer.qkv_weight, layer.qkv_bias), config)
        if layer.q_norm is not None:
            q, k = (F.rms_norm(part, (config.head_dim,), norm, eps) for part, norm in ((q, layer.q_norm), (k, layer.k_norm)))
        q, k = rotate_reference(q, positions, target.rope), rotate_reference(k, positions, target.rope)
        x = x + F.linear(attend(q, k.transpose(1, 2), v.transpose(1, 2), visible), layer.o_weight, layer.o_bias)
        gate, up = F.linear(F.rms_norm(x, width, layer.post_norm, eps), layer.gate_up_weight, layer.gate_up_bias).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, layer.down_weight, layer.down_bias)
    streams[len(target.layers)] = x
    features = torch.cat([streams[index] for index in feature_layers], -1) if feature_layers else None
    return F.rms_norm(x, width, target.norm, eps), features
