"""Llama-architecture GGUF checkpoints, dequantized to plain weights."""

import math
from typing import Any

import numpy as np
import torch

from stepgraph.model.checkpoint.errors import CheckpointError
from stepgraph.model.checkpoint.gguf_file import GGUFFile
from stepgraph.model.checkpoint.layout import Filler, parameter_views
from stepgraph.model.config import ModelConfig, RopeConfig
from stepgraph.model.rope import inverse_frequencies
from stepgraph.model.transformer import Transformer

TENSOR_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
# End-of-sequence, end-of-turn and end-of-message all end a reply.
EOS_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def load_gguf(file: GGUFFile, **options: Any) -> Transformer:
    """A transformer with the dequantized weights of a GGUF file.

    Args:
        file: the open file.
        **options: those of `Transformer` (dtype, device, max_positions, invariant_linear).

    Raises:
        CheckpointError: another architecture, an option that is not supported, or a missing, unexpected or misshapen tensor.
    """
    config = config_from_gguf(file)
    model = Transformer(config, **options)
    filler = Filler(parameter_views(model), file.path.name, tied=model.lm_head is None)
    for name in file.tensors:
        if name == ROPE_FACTORS:  # part of the config
            continue
        target = _hf_name(name)
        if filler.wants(target, file.path.name):
            array = file.tensor(name)
            if ".attn_q." in name:
                array = _undo_rope_permutation(array, config.num_heads)
            elif ".attn_k." in name:
                array = _undo_rope_permutation(array, config.num_kv_heads)
            filler.fill(target, torch.from_numpy(np.require(array, requirements="W")), file.path.name)
    filler.finish()
    return model


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Architecture from a file's metadata and from the tensors it has.

    Raises:
        CheckpointError: a key is missing or asks for something that is not supported.
    """
    metadata, tensors = file.metadata, file.tensors
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{file.path.name}: general.architecture is {architecture!r}; allowed: llama")

    def integer(key: str, default: int | None = None) -> int:
        value = metadata.get(f"llama.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"{file.path.name}: llama.{key} is {value!r}; allowed is an integer of at least 1")
        return value

    for key in ("expert_count", "attention.sliding_window"):
        if metadata.get(f"llama.{key}"):
            raise CheckpointError(f"{file.path.name}: llama.{key} is {metadata[f'llama.{key}']}; allowed is none")
    hidden, heads = integer("embedding_length"), integer("attention.head_count")
    head_dim = integer("attention.key_length", hidden // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if integer(key, head_dim) != head_dim:
            raise CheckpointError(f"{file.path.name}: llama.{key} is {integer(key)}; allowed is the head size, {head_dim}")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    try:
        return ModelConfig(
            family="llama",
            vocab_size=integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
            hidden_size=hidden,
            intermediate_size=integer("feed_forward_length"),
            num_layers=integer("block_count"),
            num_heads=heads,
            num_kv_heads=integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            # Stored as float32: the shortest decimal that rounds to it is what the authors wrote.
            rms_norm_eps=float(str(np.float32(metadata.get("llama.attention.layer_norm_rms_epsilon", 1e-5)))),
            rope=_rope(file, head_dim),
            max_position=integer("context_length"),
            tie_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            mlp_bias="blk.0.ffn_down.bias" in tensors,
            bos_token_id=bos,
            eos_token_ids=tuple(dict.fromkeys(metadata[key] for key in EOS_KEYS if key in metadata)),
        )
    except CheckpointError:
        raise
    except ValueError as error:  # shapes that contradict each other
        raise CheckpointError(f"{file.path.name}: {error}") from error


def _rope(file: GGUFFile, head_dim: int) -> RopeConfig:
    theta = float(file.metadata.get("llama.rope.freq_base", 10_000.0))
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    factor = float(file.metadata.get("llama.rope.scaling.factor", 1.0))
    if kind not in ("none", "linear"):
        raise CheckpointError(f"{file.path.name}: llama.rope.scaling.type is {kind!r}; allowed: none, linear")
    if ROPE_FACTORS not in file.tensors:
        return RopeConfig(theta=theta, type="linear", factor=factor) if kind == "linear" else RopeConfig(theta=theta)
    # Llama 3.1 and later: the file holds the factor of each frequency instead of the few numbers it comes from.
    divisors = torch.from_numpy(file.tensor(ROPE_FACTORS).copy())
    rope = RopeConfig(
        theta=theta,
        type="llama3",
        factor=float(divisors.max()),
        original_max_position=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    expected = inverse_frequencies(head_dim, RopeConfig(theta=theta))[0] / inverse_frequencies(head_dim, rope)[0]
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
        raise CheckpointError(f"{file.path.name}: {ROPE_FACTORS} is not the scaling of Llama 3.1; no other is supported")
    return rope


def _hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name that is not known is returned as it is."""
    stem, _, kind = name.rpartition(".")
    if stem in TENSOR_NAMES:
        return f"{TENSOR_NAMES[stem]}.{kind}"
    block, _, part = stem.removeprefix("blk.").partition(".")
    return f"model.layers.{block}.{LAYER_TENSOR_NAMES[part]}.{kind}" if part in LAYER_TENSOR_NAMES else name


def _undo_rope_permutation(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection, `[heads D, ...]`, from llama.cpp's order to half-split order.

    llama.cpp rotates neighbours (2i, 2i + 1) where we rotate the two halves of a head (i, i + D/2); its converter moved the
    rows of each head to suit. Biases, `[heads D]`, are moved alike.
    """
    half = math.prod(array.shape[:1]) // heads // 2
    return array.reshape(heads, half, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
