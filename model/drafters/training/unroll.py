"""The head as training sees it: every row of a text at once, unrolled over its own features.

Training-time test (Li et al. 2025, EAGLE-3): pass 0 reads the target's features, pass s the outputs of pass s − 1, as
drafting does. Row i of pass s stands at position i + s, takes the token at i + s + 1 and predicts the one at i + s + 2; it
sees the keys of pass 0 up to row i, and of the passes between only those of row i: what a draft of s further tokens after a
text of i + 1 has in its cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from stepgraph.kernels.rope_kv import rotate_reference
from stepgraph.model.drafters.training.dense import attend, split_heads
from stepgraph.model.eagle3_head import Eagle3Head


def shifted(values: Tensor, by: int) -> Tensor:
    """`[B, T, ..]` -> the same with row i holding what row i + by held; zeros at the end."""
    return torch.cat([values[:, by:], torch.zeros_like(values[:, :by])], 1)


def unroll(head: Eagle3Head, features: Tensor, tokens: Tensor, embed: Tensor, passes: int) -> list[Tensor]:
    """Normed outputs of each pass, `[B, T, hidden]`: `lm_head` of row i of pass s is the law of the token at i + s + 2.

    Args:
        head: its weights are cast to the dtype of the features; gradients reach them.
        features: `[B, T, layers read * target_hidden]`.
        tokens: `[B, T]` int64.
        embed: `[V, hidden]`.
        passes: how many, at least 1.
    """
    config, layer, dtype = head.config, head.layer, features.dtype
    eps, width, length = config.rms_norm_eps, (config.hidden_size,), tokens.shape[1]
    rows = torch.arange(length, device=tokens.device)
    own = torch.eye(length, dtype=torch.bool, device=tokens.device)
    qkv_weight, o_weight, gate_up_weight, down_weight = (
        weight.to(dtype) for weight in (layer.qkv_weight, layer.o_weight, layer.gate_up_weight, layer.down_weight)
    )

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, width, weight.to(dtype), eps)

    feature, outputs, keys, values = F.linear(features, head.fc_weight.to(dtype)), [], [], []
    for number in range(passes):
        embedded, normed = F.embedding(shifted(tokens, number + 1), embed).to(dtype), norm(feature, layer.hidden_norm)
        residual = normed if layer.norm_before_residual else feature
        inputs = torch.cat([norm(embedded, layer.input_norm), normed], -1)
        q, k, v = split_heads(F.linear(inputs, qkv_weight), config)
        if layer.q_norm is not None:
            weights = ((q, layer.q_norm), (k, layer.k_norm))
            q, k = (F.rms_norm(part, (config.head_dim,), weight.to(dtype), eps) for part, weight in weights)
        positions = (rows + number)[None]
        q, k = rotate_reference(q, positions, head.rope), rotate_reference(k, positions, head.rope)
        keys.append(k.transpose(1, 2))
        values.append(v.transpose(1, 2))
        visible = torch.cat([rows <= rows[:, None], *[own] * number], -1)[None]
        x = residual + F.linear(attend(q, torch.cat(keys, 2), torch.cat(values, 2), visible), o_weight)
        gate, up = F.linear(norm(x, layer.post_norm), gate_up_weight).chunk(2, -1)
        feature = x + F.linear(F.silu(gate) * up, down_weight)
        outputs.append(norm(feature, head.norm))
    return outputs
