"""What a head starts from: the target's last layer, which already turns features of the last layers into the next token."""

import dataclasses

import torch
from torch import Tensor

from stepgraph.model.checkpoint.eagle3 import eagle3_config_for
from stepgraph.model.eagle3_head import Eagle3Head
from stepgraph.model.transformer import Transformer

# The first guess is about the wrong token (the last layer's, one too early): at the target's own scale it would be a confident
# one. Fourteen small steps on SmolLM2-135M: held-out loss 5.96 / 6.40 / 6.60 at scale 1, 5.93 / 6.25 / 6.37 at 0.3, 10.2 /
# 10.4 / 10.6 from random weights.
SOFTENED = 0.3


def new_head(
    target: Transformer,
    target_ids: Tensor,
    *,
    seed: int,
    warm: bool = True,
    kv_heads: int | None = None,
    inner: int | None = None,
) -> Eagle3Head:
    """A float32 head for `target`, on its device, that proposes `target_ids [D]`.

    Its output rows are the target's, its last norm is the target's times `SOFTENED`. `warm`: attention, MLP and norms are those
    of the target's last layer, with the high feature passed through `fc` and a small weight on the embedding; otherwise they
    are random. `kv_heads` and `inner` change sizes, and leave what they change random.
    """
    config, changes = target.config, {}
    if kv_heads is not None:
        changes["num_kv_heads"] = kv_heads
    if inner is not None:
        changes["intermediate_size"] = inner
    head = Eagle3Head(eagle3_config_for(target, len(target_ids), **changes), device=target.device).randomize(seed)
    head.target_ids.copy_(target_ids)
    last, layer, hidden = target.layers[-1], head.layer, config.hidden_size
    with torch.no_grad():
        for norm in (layer.input_norm, layer.hidden_norm, layer.post_norm):
            norm.fill_(1.0)
        head.norm.copy_(SOFTENED * target.norm)
        head.lm_head.copy_(target.output_rows[head.target_ids])
        if warm:
            head.fc_weight.mul_(0.1)
            head.fc_weight[:, -hidden:] += torch.eye(hidden, device=target.device)
            layer.post_norm.copy_(last.post_norm)
            layer.hidden_norm.copy_(last.input_norm)
            if layer.qkv_weight.shape[0] == last.qkv_weight.shape[0]:
                layer.qkv_weight[:, hidden:].copy_(last.qkv_weight)
                layer.o_weight.copy_(last.o_weight)
            if layer.down_weight.shape == last.down_weight.shape:
                layer.gate_up_weight.copy_(last.gate_up_weight)
                layer.down_weight.copy_(last.down_weight)
    return head


def copy_in_float32(head: Eagle3Head) -> Eagle3Head:
    """The same head with weights that an optimiser can move by little."""
    copy = Eagle3Head(head.eagle, device=head.device)
    copy.load_state_dict(head.state_dict())
    copy.target_ids.copy_(head.target_ids)
    return copy


def widened(head: Eagle3Head, target: Transformer, target_ids: Tensor) -> Eagle3Head:
    """A float32 head that proposes `target_ids [D]` (ascending, all of the head's among them); further output rows are the
    target's own, which is what the head's were at first.
    """
    eagle = dataclasses.replace(head.eagle, draft_vocab_size=len(target_ids))
    wider = Eagle3Head(eagle, device=head.device)
    wider.target_ids.copy_(target_ids)
    known = torch.searchsorted(wider.target_ids, head.target_ids)
    rows = target.output_rows[wider.target_ids].float()
    rows[known] = head.lm_head.float()
    wider.load_state_dict(head.state_dict() | {"lm_head": rows})
    return wider
