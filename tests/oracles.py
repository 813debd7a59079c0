"""Independent implementations to compare with, and the helpers that drive both sides."""

import torch
import transformers
from torch import Tensor

from stepgraph.model.config import RopeConfig
from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.rows import query_rows
from stepgraph.model.transformer import Transformer

TRANSFORMERS_CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def tiny_transformers(family: str, *, seed: int = 0, **overrides) -> transformers.PreTrainedModel:
    """A small transformers model whose weights, norms and biases included, are all random."""
    config_class, model_class = TRANSFORMERS_CLASSES[family]
    fields = dict(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = model_class(config_class(**{**fields, **overrides}))
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.normal_(1.0, 0.2, generator=generator)
        else:
            weight.data.normal_(0.0, 0.3, generator=generator)
    return model.eval()


def to_transformers(model: Transformer) -> transformers.PreTrainedModel:
    """The transformers model with the configuration and the (un-fused) weights of `model`, which it shares, on the CPU."""
    config = model.config
    config_class, model_class = TRANSFORMERS_CLASSES[config.family]
    fields = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters=rope_parameters(config.rope),
        bos_token_id=config.bos_token_id,
        eos_token_id=list(config.eos_token_ids) or None,
    )
    if config.family == "llama":
        fields.update(attention_bias=config.qkv_bias, mlp_bias=config.mlp_bias)
    else:
        window = max(config.layer_windows)
        kinds = ["sliding_attention" if w else "full_attention" for w in config.layer_windows]
        fields.update(use_sliding_window=window > 0, sliding_window=window or None, layer_types=kinds)
    if config.family == "qwen3":
        fields.update(attention_bias=config.qkv_bias)
    with torch.device("meta"):  # spares a random initialisation
        theirs = model_class(config_class(**fields))

    state = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.norm}
    state["lm_head.weight"] = model.output_rows
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        parts = {"self_attn.o_proj": (layer.o_weight, layer.o_bias), "mlp.down_proj": (layer.down_weight, layer.down_bias)}
        qkv = (layer.qkv_weight, layer.qkv_bias)
        for name, rows in {"q": slice(0, q), "k": slice(q, q + kv), "v": slice(q + kv, None)}.items():
            parts[f"self_attn.{name}_proj"] = tuple(None if fused is None else fused[rows] for fused in qkv)
        gate_up, inner = (layer.gate_up_weight, layer.gate_up_bias), config.intermediate_size
        for name, rows in {"gate": slice(0, inner), "up": slice(inner, None)}.items():
            parts[f"mlp.{name}_proj"] = tuple(None if fused is None else fused[rows] for fused in gate_up)
        parts["input_layernorm"] = (layer.input_norm, None)
        parts["post_attention_layernorm"] = (layer.post_norm, None)
        parts["self_attn.q_norm"], parts["self_attn.k_norm"] = (layer.q_norm, None), (layer.k_norm, None)
        for name, (weight, bias) in parts.items():
            state.update({f"{prefix}{name}.{kind}": t for kind, t in (("weight", weight), ("bias", bias)) if t is not None})
    theirs.load_state_dict(state, strict=True, assign=True)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config=theirs.config)
    return theirs.eval()


def rope_parameters(rope: RopeConfig) -> dict:
    """transformers' `rope_parameters` of our rotary configuration."""
    fields = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.type != "default":
        fields["factor"] = rope.factor
    if rope.type in ("llama3", "yarn"):
        fields["original_max_position_embeddings"] = rope.original_max_position
    if rope.type == "llama3":
        fields.update(low_freq_factor=rope.low_freq_factor, high_freq_factor=rope.high_freq_factor)
    if rope.type == "yarn":
        names = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
        fields.update({name: getattr(rope, name) for name in names})
    return fields


@torch.inference_mode()
def our_logits(model: Transformer, tokens: Tensor, query_len: int | None = None, block_size: int = 16) -> Tensor:
    """Logits `[T, vocab]` of one sequence `tokens [T]` through the paged cache, `query_len` tokens a pass (default all)."""
    length = tokens.shape[0]
    query_len = query_len or length
    blocks = -(-length // block_size)
    kv = PagedKV(model.config, num_blocks=blocks + 1, block_size=block_size, dtype=model.dtype, device=model.device)
    table = torch.arange(1, blocks + 1, device=model.device)[None]
    live, writable = torch.ones(1, dtype=torch.bool, device=model.device), torch.tensor([length], device=model.device)
    out = []
    for first in range(0, length, query_len):
        chunk = tokens[None, first : first + query_len]
        rows = query_rows(torch.tensor([first], device=model.device), chunk.shape[1], table, block_size, live, writable)
        out.append(model.logits(model.hidden(chunk, rows, kv))[0])
    return torch.cat(out)


@torch.inference_mode()
def transformers_logits(model: transformers.PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits `[T, vocab]` of one sequence `tokens [T]`."""
    return model(tokens[None], use_cache=False).logits[0]
