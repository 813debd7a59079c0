"""The target transformer: Llama, Qwen2 and Qwen3 families, over a paged KV cache, for any fixed query length."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from stepgraph.kernels.activation import silu_mul
from stepgraph.kernels.attention import build_attention_work, uniform_decode_attention
from stepgraph.kernels.attention.cpu import MAX_ROWWISE_QUERY
from stepgraph.kernels.linear import linear
from stepgraph.kernels.norm import add_rms_norm, rms_norm
from stepgraph.kernels.packed import pack
from stepgraph.kernels.rope_kv import rope_kv_write
from stepgraph.model.config import ModelConfig
from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.rope import rope_table
from stepgraph.model.rows import QueryRows


class DecoderLayer(nn.Module):
    """Weights of one layer. Projections that read the same input are fused: q, k, v in one matrix, gate and up in one.

    `qkv_weight [(H + 2 KV) D, hidden]`, `o_weight [hidden, H D]`, `gate_up_weight [2 I, hidden]`,
    `down_weight [hidden, I]`; biases, `q_norm [D]` and `k_norm [D]` only where the family has them (else None); scales
    `qkv_scale`, … only where the weights are int8 (`stepgraph.model.quantize`).
    """

    def __init__(self, config: ModelConfig, layer: int, empty: Callable[..., nn.Parameter]):
        super().__init__()
        self.config, self.window = config, config.layer_windows[layer]
        hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        self.input_norm = empty(hidden)
        self.qkv_weight = empty(config.qkv_size, hidden)
        self.qkv_bias = empty(config.qkv_size) if config.qkv_bias else None
        self.q_norm = empty(config.head_dim) if config.qk_norm else None
        self.k_norm = empty(config.head_dim) if config.qk_norm else None
        self.o_weight = empty(hidden, heads)
        self.o_bias = empty(hidden) if config.output_bias else None
        self.post_norm = empty(hidden)
        self.gate_up_weight = empty(2 * inner, hidden)
        self.gate_up_bias = empty(2 * inner) if config.mlp_bias else None
        self.down_weight = empty(hidden, inner)
        self.down_bias = empty(hidden) if config.mlp_bias else None
        for name in ("qkv", "o", "gate_up", "down"):
            self.register_buffer(f"{name}_scale", None, persistent=False)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rows: QueryRows,
        kv: tuple[Tensor, Tensor],
        rope: Tensor,
        invariant: bool,
        work: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`x [B, Q, hidden]` -> (layer output before its residual, residual). `residual` None starts the stream at x.

        `work` is the attention work list of this batch and window, built by the op where it is None.
        """
        if residual is None:
            normed, residual = rms_norm(x, self.input_norm, self.config.rms_norm_eps), x
        else:
            normed, residual = add_rms_norm(x, residual, self.input_norm, self.config.rms_norm_eps)
        return self.mix(normed, residual, rows, kv, rope, invariant, work)

    def mix(
        self,
        normed: Tensor,
        residual: Tensor,
        rows: QueryRows,
        kv: tuple[Tensor, Tensor],
        rope: Tensor,
        invariant: bool,
        work: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention over `normed [B, Q, inputs of qkv_weight]` and the MLP; returns as `forward` does."""
        config, eps, (k_cache, v_cache) = self.config, self.config.rms_norm_eps, kv
        qkv = linear(normed, self.qkv_weight, self.qkv_bias, invariant, self.qkv_scale)
        q = rope_kv_write(
            qkv, rows.positions, rope, rows.kv_slots, k_cache, v_cache, self.q_norm, self.k_norm, config.num_heads, eps
        )
        attended = uniform_decode_attention(
            q, k_cache, v_cache, rows.block_table, rows.seq_lens, config.head_dim**-0.5, self.window, 0.0, None, work
        )
        attended = linear(attended.flatten(2), self.o_weight, self.o_bias, invariant, self.o_scale)
        normed, residual = add_rms_norm(attended, residual, self.post_norm, eps)
        gate_up = linear(normed, self.gate_up_weight, self.gate_up_bias, invariant, self.gate_up_scale)
        return linear(silu_mul(gate_up), self.down_weight, self.down_bias, invariant, self.down_scale), residual


@torch.no_grad()
def randomize(module: nn.Module, seed: int) -> None:
    """Fill the weights of a module with N(0, 1/inputs), norms near 1, other vectors near 0."""
    parameters = dict(module.named_parameters())
    generator = torch.Generator(next(iter(parameters.values())).device).manual_seed(seed)
    for name, weight in parameters.items():
        if "norm" in name:
            weight.normal_(1.0, 0.1, generator=generator)
        elif weight.dim() == 1:
            weight.normal_(0.0, 0.02, generator=generator)
        else:
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)


def multiplied(module: nn.Module) -> list[nn.Parameter]:
    """The matrices that `module` multiplies with. Embeddings are only looked up, unless they are the output matrix too."""
    named = module.named_parameters()
    return [weight for name, weight in named if weight.dim() == 2 and (name != "embed" or module.lm_head is None)]


def pack_weights(module: nn.Module) -> None:
    """Pack what `module` multiplies with, once its weights are what they shall be (`stepgraph.kernels.packed.pack`)."""
    pack(*multiplied(module))


class Transformer(nn.Module):
    """Decoder-only transformer whose weights start unset; `stepgraph.model.checkpoint` or `randomize` fills them.

    Args:
        config: shapes and options.
        dtype: dtype of weights and activations.
        device: where they live.
        max_positions: rows of the RoPE table, hence the largest position + 1; default the checkpoint's own maximum.
        invariant_linear: run matrix products so that a row's bits do not depend on how many rows there are; longer queries than
            `MAX_ROWWISE_QUERY` are left out. They are chunks of a prompt, which come alone and alike whatever k is.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        max_positions: int | None = None,
        invariant_linear: bool = False,
    ):
        super().__init__()

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        self.config, self.invariant_linear = config, invariant_linear
        self.embed = empty(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i, empty) for i in range(config.num_layers))
        self.norm = empty(config.hidden_size)
        self.lm_head = None if config.tie_embeddings else empty(config.vocab_size, config.hidden_size)
        table = rope_table(config.head_dim, config.rope, max_positions or config.max_position)
        table = table.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
        self.register_buffer("rope", table, persistent=False)
        self.register_buffer("lm_head_scale", None, persistent=False)  # where `lm_head` is int8

    @property
    def max_positions(self) -> int:
        return self.rope.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def output_rows(self) -> nn.Parameter:
        """The output matrix `[V, hidden]`: `lm_head`, or the embeddings where they are tied."""
        return self.embed if self.lm_head is None else self.lm_head

    def randomize(self, seed: int = 0) -> "Transformer":
        """Fill the weights with N(0, 1/inputs), norms near 1; for shapes without a checkpoint. Returns self."""
        randomize(self, seed)
        return self

    def hidden(self, tokens: Tensor, rows: QueryRows, kv: PagedKV, num_layers: int | None = None) -> Tensor:
        """Final-normed hidden states `[B, Q, hidden]` of `tokens [B, Q]` (int64); writes keys and values into `kv`.

        A negative token stands for "no token": it is never embedded, and its row's output means nothing.
        `num_layers` stops after the first layers (early exit).
        """
        return self.hidden_and_features(tokens, rows, kv, (), num_layers)[0]

    def hidden_and_features(
        self, tokens: Tensor, rows: QueryRows, kv: PagedKV, feature_layers: Sequence[int], num_layers: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """`hidden`, and what enters the layers `feature_layers` (the residual stream, before any norm), side by side:
        `[B, Q, hidden * len(feature_layers)]`, or None where none are asked for. Layer `num_layers` is what leaves the last.
        """
        x, residual = nn.functional.embedding(tokens.clamp(min=0), self.embed), None
        layers, invariant = self.layers[:num_layers], self.invariant_linear and tokens.shape[1] <= MAX_ROWWISE_QUERY
        table_tokens, pool_tokens = rows.block_table.shape[1] * kv.block_size, kv.num_blocks * kv.block_size
        # Which keys there are is the same for all layers of one window.
        work = {
            window: build_attention_work(rows.seq_lens, tokens.shape[1], window, table_tokens, pool_tokens)
            for window in dict.fromkeys(layer.window for layer in layers)
        }
        streams: dict[int, Tensor] = {}
        for index, (layer, cache) in enumerate(zip(layers, kv.layers(), strict=False)):
            if index in feature_layers:
                streams[index] = x if residual is None else x + residual
            x, residual = layer(x, residual, rows, cache, self.rope, invariant, work[layer.window])
        hidden, stream = add_rms_norm(x, residual, self.norm, self.config.rms_norm_eps)
        if not feature_layers:
            return hidden, None
        streams[len(layers)] = stream
        return hidden, torch.cat([streams[index] for index in feature_layers], dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` -> `[..., vocab]` in the model's dtype."""
        return linear(hidden, self.output_rows, None, self.invariant_linear, self.lm_head_scale)
