"""Hugging Face `config.json` -> `ModelConfig`, for the llama, qwen2 and qwen3 families.

Both spellings of rotary scaling are read: `rope_theta` + `rope_scaling`, and the `rope_parameters` of transformers 5. A field
that would change the numbers and is not supported is an error: a model that loads computes what its authors meant.
"""

from collections.abc import Mapping
from typing import Any

from stepgraph.model.checkpoint.errors import CheckpointError
from stepgraph.model.config import FAMILIES, ROPE_TYPES, ModelConfig, RopeConfig

# What the transformers classes assume for a field that config.json leaves out; None for num_key_value_heads means "as many as
# query heads", None for head_dim means hidden_size / heads.
_QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILY_DEFAULTS = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "qwen2": _QWEN_DEFAULTS,
    "qwen3": {**_QWEN_DEFAULTS, "head_dim": 128},
}


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Architecture of a Hugging Face checkpoint.

    Args:
        config: the contents of `config.json`.
        generation: the contents of `generation_config.json`, whose end-of-sequence ids are added to the config's own.

    Raises:
        CheckpointError: a field is missing or asks for something that is not supported.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise _unsupported("model_type", family, FAMILIES)
    given = {**FAMILY_DEFAULTS[family], **config}
    _require(given, "hidden_act", "silu", default="silu")
    if given.get("quantization_config") is not None:
        raise CheckpointError("config.json: quantization_config is set; allowed are checkpoints with plain float weights")

    hidden, heads, layers = (_integer(given, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    attention_bias = family == "qwen2" or bool(given.get("attention_bias", False))
    max_position = _integer(given, "max_position_embeddings")
    eos = [*_ids(given.get("eos_token_id"), "eos_token_id"), *_ids((generation or {}).get("eos_token_id"), "eos_token_id")]
    bos = _ids(given.get("bos_token_id"), "bos_token_id")
    try:
        return ModelConfig(
            family=family,
            vocab_size=_integer(given, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(given, "intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=heads if given.get("num_key_value_heads") is None else _integer(given, "num_key_value_heads"),
            head_dim=hidden // heads if given.get("head_dim") is None else _integer(given, "head_dim"),
            rms_norm_eps=_number(given, "rms_norm_eps", default=1e-6),
            rope=_rope(given, max_position),
            max_position=max_position,
            tie_embeddings=bool(given.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias,
            output_bias=attention_bias and family != "qwen2",
            mlp_bias=family == "llama" and bool(given.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            layer_windows=_layer_windows(given, family, layers),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=tuple(dict.fromkeys(eos)),
        )
    except CheckpointError:
        raise
    except ValueError as error:  # shapes that contradict each other
        raise CheckpointError(f"config.json: {error}") from error


def _rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    nested = next((key for key, value in given.items() if isinstance(value, Mapping)), None)
    if nested is not None:
        raise CheckpointError(f"config.json: rope_parameters has an entry for {nested!r}; allowed is one rotary for all layers")
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise _unsupported("rope_type", kind, ROPE_TYPES)
    for fields in (config, given):
        _require(fields, "partial_rotary_factor", 1, default=1)
    given.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    theta = _number(given, "rope_theta")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, type=kind, factor=_number(given, "factor"))

    # As transformers does: a field beside the rotary's own wins, and the scaled length stands in for a missing original.
    original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    given["original_max_position_embeddings"] = original or max_position
    original = _integer(given, "original_max_position_embeddings")
    if kind == "llama3":
        low, high = _number(given, "low_freq_factor"), _number(given, "high_freq_factor")
        if low >= high:
            raise CheckpointError(f"config.json: low_freq_factor is {low}; allowed is less than high_freq_factor, {high}")
        return RopeConfig(
            theta=theta,
            type=kind,
            factor=_number(given, "factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RopeConfig(
        theta=theta,
        type=kind,
        factor=_number(given, "factor", default=max_position / original),
        original_max_position=original,
        beta_fast=_number(given, "beta_fast", default=32.0),
        beta_slow=_number(given, "beta_slow", default=1.0),
        attention_factor=_optional_number(given, "attention_factor"),
        mscale=_optional_number(given, "mscale"),
        mscale_all_dim=_optional_number(given, "mscale_all_dim"),
        truncate=bool(given.get("truncate", True)),
    )


def _layer_windows(config: Mapping[str, Any], family: str, layers: int) -> tuple[int, ...]:
    """Sliding window of each layer, 0 for none. Only the Qwen families have one, behind `use_sliding_window`."""
    sliding = family != "llama" and bool(config.get("use_sliding_window", False)) and config.get("sliding_window") is not None
    kinds = config.get("layer_types")
    if kinds is None:
        first = _integer(config, "max_window_layers", minimum=0) if sliding else layers
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise CheckpointError(f"config.json: layer_types has {len(kinds)} entries; allowed is num_hidden_layers, {layers}")
    allowed = ("full_attention", "sliding_attention") if sliding else ("full_attention",)
    for kind in kinds:
        if kind not in allowed:
            raise _unsupported("layer_types", kind, allowed)
    window = _integer(config, "sliding_window") if sliding else 0
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _ids(value: Any, field: str) -> list[int]:
    """Token ids of a field that may hold none, one or several."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointError(f"config.json: {field} is {value!r}; allowed are an integer, a list of integers and null")
    return ids


def _integer(config: Mapping[str, Any], field: str, minimum: int = 1) -> int:
    value = config.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise CheckpointError(f"config.json: {field} is {value!r}; allowed is an integer of at least {minimum}")
    return value


def _number(config: Mapping[str, Any], field: str, default: float | None = None) -> float:
    value = default if config.get(field) is None else config[field]
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json: {field} is {value!r}; allowed is a number above 0")
    return float(value)


def _optional_number(config: Mapping[str, Any], field: str) -> float | None:
    return _number(config, field) if config.get(field) else None


def _require(config: Mapping[str, Any], field: str, allowed: Any, default: Any) -> None:
    value = config.get(field)
    if (default if value is None else value) != allowed:
        raise _unsupported(field, value, (allowed,))


def _unsupported(field: str, value: Any, allowed: tuple) -> CheckpointError:
    return CheckpointError(f"config.json: {field} is {value!r}; allowed: {', '.join(map(str, allowed))}")
