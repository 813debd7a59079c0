"""The EAGLE-3 head: one decoder layer that reads the target's hidden states and the token that came after them.

Row i stands for position i of the text: it takes the target's features of position i and the embedding of the token at i + 1,
and its output is a law for the token at i + 2. Its output before the last norm can stand in for the features of position
i + 1, which is how it drafts further than one token (Li et al. 2025, EAGLE-3).

    f = fc [h_low, h_mid, h_high]      (or the head's own last output)
    x = attention([norm(embed(token)), norm(f)]) + f,  y = mlp(norm(x)) + x,  logits = lm_head norm(y)
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stepgraph.kernels.linear import linear
from stepgraph.kernels.norm import rms_norm
from stepgraph.model.config import ModelConfig
from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.rope import rope_table
from stepgraph.model.rows import QueryRows
from stepgraph.model.transformer import DecoderLayer, randomize


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Low, middle and high layer whose inputs public heads read: 2, L // 2, L − 3 of L; a shallow target's nearest."""
    low, high = min(2, num_layers), max(num_layers - 3, 0)
    return (low, num_layers // 2, high)


@dataclass(frozen=True)
class Eagle3Config:
    """Shapes of a head.

    Attributes:
        decoder: its one layer; `vocab_size` is the target's.
        draft_vocab_size: tokens it can propose.
        target_hidden_size: width of one hidden state of the target.
        feature_layers: layers of the target whose inputs it reads; see `Transformer.hidden_and_features`.
        norm_before_residual: the residual stream carries the normed feature instead of the feature.
        own_embedding: it has token embeddings of its own; otherwise it uses the target's.
    """

    decoder: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    norm_before_residual: bool = False
    own_embedding: bool = False

    def __post_init__(self):
        if self.decoder.num_layers != 1:
            raise ValueError(f"num_layers={self.decoder.num_layers}; an EAGLE-3 head has one decoder layer")
        if not 1 <= self.draft_vocab_size <= self.decoder.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size}; allowed is 1 to the vocabulary's {self.decoder.vocab_size}"
            )
        if not self.feature_layers:
            raise ValueError("feature_layers is empty; a head reads at least one layer of the target")
        if not self.own_embedding and self.target_hidden_size != self.decoder.hidden_size:
            raise ValueError(
                f"hidden_size={self.decoder.hidden_size} differs from the target's {self.target_hidden_size}, "
                "so the head needs token embeddings of its own"
            )

    @property
    def reduced(self) -> bool:
        """Whether there are tokens that the head cannot propose."""
        return self.draft_vocab_size < self.decoder.vocab_size


class Eagle3Layer(DecoderLayer):
    """A decoder layer whose attention reads token embedding and feature side by side: `qkv_weight [.., 2 * hidden]`.

    `input_norm` is of the embedding, `hidden_norm` of the feature.
    """

    def __init__(self, config: Eagle3Config, empty: Callable[..., nn.Parameter]):
        super().__init__(config.decoder, 0, empty)
        self.norm_before_residual = config.norm_before_residual
        self.qkv_weight = empty(config.decoder.qkv_size, 2 * config.decoder.hidden_size)
        self.hidden_norm = empty(config.decoder.hidden_size)

    def attention_input(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Both `[B, Q, hidden]` -> (what attention reads `[B, Q, 2 hidden]`, the residual stream)."""
        eps = self.config.rms_norm_eps
        normed = rms_norm(feature, self.hidden_norm, eps)
        residual = normed if self.norm_before_residual else feature
        return torch.cat([rms_norm(embedded, self.input_norm, eps), normed], dim=-1), residual


class Eagle3Head(nn.Module):
    """A head whose weights start unset; `stepgraph.model.checkpoint.eagle3` or `randomize` fills them.

    Weights: `fc_weight [hidden, layers read * target_hidden]`, `layer`, `norm [hidden]`, `lm_head [D, hidden]`, and
    `embed [V, hidden]` if it has its own. `target_ids [D]` int64: the target's id of each draft id.

    Args:
        config: shapes.
        dtype, device, invariant_linear: as of `stepgraph.model.transformer.Transformer`.
        max_positions: rows of the RoPE table; default the config's own maximum.
    """

    def __init__(
        self,
        config: Eagle3Config,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        max_positions: int | None = None,
        invariant_linear: bool = False,
    ):
        super().__init__()

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)

        decoder = config.decoder
        self.eagle, self.config, self.invariant_linear = config, decoder, invariant_linear
        self.fc_weight = empty(decoder.hidden_size, config.target_hidden_size * len(config.feature_layers))
        self.layer = Eagle3Layer(config, empty)
        self.norm = empty(decoder.hidden_size)
        self.lm_head = empty(config.draft_vocab_size, decoder.hidden_size)
        self.embed = empty(decoder.vocab_size, decoder.hidden_size) if config.own_embedding else None
        every = torch.arange(config.draft_vocab_size, device=device)
        # Spread over the vocabulary until a checkpoint says better: for random weights any choice will do.
        self.register_buffer("target_ids", every * decoder.vocab_size // config.draft_vocab_size, persistent=False)
        table = rope_table(decoder.head_dim, decoder.rope, max_positions or decoder.max_position)
        table = table.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
        self.register_buffer("rope", table, persistent=False)
        for name in ("fc_scale", "lm_head_scale"):  # where weights are int8
            self.register_buffer(name, None, persistent=False)

    @property
    def max_positions(self) -> int:
        return self.rope.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.device

    def randomize(self, seed: int = 0) -> "Eagle3Head":
        """Fill the weights at random; for shapes without a checkpoint. Returns self."""
        randomize(self, seed)
        return self

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden states of the target side by side, `[.., layers read * target_hidden]` -> one feature `[.., hidden]`."""
        return linear(features, self.fc_weight, None, self.invariant_linear, self.fc_scale)

    def forward(self, tokens: Tensor, feature: Tensor, rows: QueryRows, kv: PagedKV, embed: Tensor) -> Tensor:
        """The next feature of each row, `[B, Q, hidden]`; keys and values go to `kv`, which has one layer.

        Args:
            tokens: `[B, Q]` int64, the token after each row's position; negative means none, and its row's output nothing.
            feature: `[B, Q, hidden]`, fused features or earlier outputs.
            rows: where the rows sit.
            kv: the head's own cache.
            embed: `[V, hidden]`, the token embeddings to use.
        """
        embedded = nn.functional.embedding(tokens.clamp(min=0), embed)
        inputs, residual = self.layer.attention_input(embedded, feature)
        x, residual = self.layer.mix(inputs, residual, rows, kv.layers()[0], self.rope, self.invariant_linear, None)
        return x + residual

    def logits(self, feature: Tensor) -> Tensor:
        """Outputs of `forward`, `[.., hidden]` -> logits over the draft vocabulary `[.., D]`."""
        normed = rms_norm(feature, self.norm, self.config.rms_norm_eps)
        return linear(normed, self.lm_head, None, self.invariant_linear, self.lm_head_scale)
