"""`config.json` of a public EAGLE-3 checkpoint <-> `Eagle3Config`.

It is the config of a one-layer Llama (or Qwen3) with a few fields more: `draft_vocab_size`, `target_hidden_size` where the
target is wider or narrower, and the layers of the target that are read, in one of two spellings. At the top level (vLLM,
speculators), `eagle_aux_hidden_state_layer_ids` names layers by their *input*; within `eagle_config` (SpecForge, SGLang,
Model Optimizer) by their *output*, which is the next layer's input. Without either: 2, L // 2, L − 3, by input.
"""

from collections.abc import Mapping
from typing import Any

from stepgraph.model.checkpoint.config import config_from_hf
from stepgraph.model.checkpoint.errors import CheckpointError
from stepgraph.model.config import ModelConfig, RopeConfig
from stepgraph.model.eagle3_head import Eagle3Config, default_feature_layers

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Fields that would change the numbers, with the only value that is supported.
PLAIN = {"norm_before_fc": False, "fc_norm": False, "norm_output": False, "parallel_drafting": False, "logit_scale": 1.0}
ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Qwen3ForCausalLMEagle3"}


def eagle3_from_hf(config: Mapping[str, Any], target: ModelConfig, own_embedding: bool) -> Eagle3Config:
    """Shapes of a head.

    Args:
        config: the contents of its `config.json`.
        target: the model it is to draft for.
        own_embedding: whether the checkpoint has token embeddings.

    Raises:
        CheckpointError: a field is missing, is not supported, or does not fit the target.
    """
    if "speculators_model_type" in config or "speculators_config" in config:
        raise CheckpointError("config.json is in the layout of the speculators library; allowed is the public EAGLE-3 layout")
    for field, allowed in PLAIN.items():
        if config.get(field) not in (None, allowed):
            raise CheckpointError(f"config.json: {field} is {config[field]!r}; allowed: {allowed}")
    decoder = config_from_hf({"num_hidden_layers": 1, **config})
    if decoder.vocab_size != target.vocab_size:
        raise CheckpointError(
            f"the head is for a vocabulary of {decoder.vocab_size} tokens, the target has {target.vocab_size}"
        )
    width = _integer(config, "target_hidden_size", decoder.hidden_size)
    if width != target.hidden_size:
        raise CheckpointError(f"the head is for a target of hidden size {width}, this one has {target.hidden_size}")
    try:
        return Eagle3Config(
            decoder=decoder,
            draft_vocab_size=_integer(config, "draft_vocab_size", decoder.vocab_size),
            target_hidden_size=width,
            feature_layers=_feature_layers(config, target.num_layers),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            own_embedding=own_embedding,
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"config.json: {error}") from error


def eagle3_to_hf(config: Eagle3Config, dtype: str) -> dict[str, Any]:
    """The `config.json` that `eagle3_from_hf` reads back, and other engines too; `dtype` is that of the weights."""
    decoder = config.decoder
    layers = list(config.feature_layers)
    return {
        "architectures": [ARCHITECTURES.get(decoder.family, ARCHITECTURES["llama"])],
        "model_type": decoder.family,
        "torch_dtype": dtype,
        "hidden_size": decoder.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": decoder.rms_norm_eps,
        "attention_bias": decoder.qkv_bias,
        "mlp_bias": decoder.mlp_bias,
        "max_position_embeddings": decoder.max_position,
        **_rope_to_hf(decoder.rope),
        "vocab_size": decoder.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": decoder.bos_token_id,
        "eos_token_id": list(decoder.eos_token_ids) or None,
        "norm_before_residual": config.norm_before_residual,
        LAYER_IDS: layers,
        # By output there is no name for the embeddings, which are the input of layer 0.
        "eagle_config": {"use_aux_hidden_state": True}
        | ({LAYER_IDS: [layer - 1 for layer in layers]} if min(layers) > 0 else {}),
    }


def _feature_layers(config: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    inner = config.get("eagle_config") or {}
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"config.json: eagle_config is {inner!r}; allowed is an object")
    if not inner.get("use_aux_hidden_state", True):
        raise CheckpointError("config.json: use_aux_hidden_state is false; allowed are heads that read several layers")
    spellings = {}
    for name, fields, shift in (("top level", config, 0), ("eagle_config", inner, 1)):
        ids = fields.get(LAYER_IDS)
        if ids is not None:
            if not isinstance(ids, list) or not ids or not all(type(layer) is int for layer in ids):
                raise CheckpointError(f"config.json: {LAYER_IDS} is {ids!r}; allowed is a list of layer numbers")
            spellings[name] = tuple(layer + shift for layer in ids)
    if len(set(spellings.values())) > 1:
        raise CheckpointError(f"config.json: {LAYER_IDS} at the top level and in eagle_config name different layers")
    layers = next(iter(spellings.values()), default_feature_layers(depth))
    if not all(0 <= layer <= depth for layer in layers):
        raise CheckpointError(f"the head reads the inputs of layers {list(layers)}; the target has {depth} layers")
    return layers


def _integer(config: Mapping[str, Any], field: str, default: int) -> int:
    value = default if config.get(field) is None else config[field]
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json: {field} is {value!r}; allowed is an integer of at least 1")
    return value


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    if rope.type == "default":
        return {"rope_theta": rope.theta}
    fields: dict[str, Any] = {"rope_type": rope.type, "factor": rope.factor}
    if rope.type in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = rope.original_max_position
    if rope.type == "llama3":
        fields |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.type == "yarn":
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        fields |= {name: getattr(rope, name) for name in names if getattr(rope, name) is not None}
    return {"rope_theta": rope.theta, "rope_scaling": fields}
