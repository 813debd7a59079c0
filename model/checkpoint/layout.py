"""Where each tensor of a checkpoint goes: Hugging Face tensor names -> views of our (fused) parameters.

Filling views in place needs no second copy of a fused matrix, and a view's shape is the shape its tensor must have.
"""

from collections.abc import Iterator

from torch import Tensor

from stepgraph.model.checkpoint.errors import CheckpointError
from stepgraph.model.transformer import DecoderLayer, Transformer


def parameter_views(model: Transformer) -> dict[str, Tensor]:
    """Views that cover every parameter of `model` exactly once, by the name their tensor has in a checkpoint."""
    views = {"model.embed_tokens.weight": model.embed.data, "model.norm.weight": model.norm.data}
    if model.lm_head is not None:
        views["lm_head.weight"] = model.lm_head.data
    for index, layer in enumerate(model.layers):
        views.update((f"model.layers.{index}.{name}", view) for name, view in layer_views(layer))
    return views


def layer_views(layer: DecoderLayer) -> Iterator[tuple[str, Tensor]]:
    """(name within the layer, view) of each tensor of a layer."""
    config = layer.config
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    split = {
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj": ("qkv", [count * config.head_dim for count in heads]),
        "self_attn.o_proj": ("o", [config.hidden_size]),
        "mlp.gate_proj mlp.up_proj": ("gate_up", [config.intermediate_size] * 2),
        "mlp.down_proj": ("down", [config.hidden_size]),
    }
    for names, (parameter, rows) in split.items():
        for kind in ("weight", "bias"):
            fused = getattr(layer, f"{parameter}_{kind}")
            if fused is not None:
                for name, view in zip(names.split(), fused.data.split(rows), strict=True):
                    yield f"{name}.{kind}", view
    norms = {
        "input_layernorm": layer.input_norm,
        "post_attention_layernorm": layer.post_norm,
        "self_attn.q_norm": layer.q_norm,
        "self_attn.k_norm": layer.k_norm,
    }
    for name, norm in norms.items():
        if norm is not None:
            yield f"{name}.weight", norm.data


class Filler:
    """Fills a model tensor by tensor, and at the end insists that nothing was left out.

    Args:
        views: what to fill, by the name its tensor has (`parameter_views`).
        source: the checkpoint's name, for messages.
        tied: the embedding is the head, too.
    """

    def __init__(self, views: dict[str, Tensor], source: str, tied: bool = False):
        self.source, self.tied, self.waiting = source, tied, dict(views)
        self.filled: set[str] = set()

    def wants(self, name: str, where: str) -> bool:
        """True for a tensor of the model, False for one that may be ignored.

        Raises:
            CheckpointError: the model has no such tensor, or it came before.
        """
        if name in self.waiting:
            return True
        if name in self.filled:
            raise CheckpointError(f"{self.source}: tensor {name} is in the checkpoint twice, the second time in {where}")
        # Old checkpoints store the rotary frequencies, and some tied ones a copy of the embedding as the head.
        if name.endswith("rotary_emb.inv_freq") or (self.tied and name == "lm_head.weight"):
            return False
        raise CheckpointError(f"{self.source}: tensor {name} in {where} is unexpected, the model has no such weight")

    def fill(self, name: str, tensor: Tensor, where: str) -> None:
        """Copy `tensor` into its view, in the model's dtype and on its device.

        Raises:
            CheckpointError: the shape differs, or the tensor holds no floating-point numbers.
        """
        view = self.waiting[name]
        if tensor.shape != view.shape:
            found, expected = tuple(tensor.shape), tuple(view.shape)
            raise CheckpointError(f"{self.source}: tensor {name} in {where} has shape {found}, the config asks for {expected}")
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{self.source}: tensor {name} in {where} is {tensor.dtype}; only float weights are supported"
            )
        view.copy_(tensor)
        del self.waiting[name]
        self.filled.add(name)

    def finish(self) -> None:
        """Raise a CheckpointError that names what is missing, if anything is."""
        if self.waiting:
            names = list(self.waiting)
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{self.source}: tensor {names[0]}{more} missing from the checkpoint")
