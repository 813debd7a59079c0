"""A step of shapes alone: models without weights, from names."""

from dataclasses import replace

import torch

from stepgraph.capture.state import DecodeState
from stepgraph.capture.step import SpeculativeStep
from stepgraph.model.checkpoint import load_config
from stepgraph.model.checkpoint.eagle3 import eagle3_config_for
from stepgraph.model.config import ModelConfig
from stepgraph.model.drafters import DrafterSpec, make_drafter
from stepgraph.model.eagle3_head import Eagle3Head
from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.transformer import Transformer


class StepShapes:
    """Makes steps on the "meta" device, of the model as it is or of fewer layers.

    Args:
        model: as `load_model` takes it, or the name of a preset.
        drafter: see `stepgraph.model.drafters.spec.KNOWN`.
        max_batch, max_len, k_max, block_size: sizes of the state.
        dtype: of weights and cache.

    Attributes:
        layers: kind of layer → how many: "target", and "early-exit" or "draft-model" where the drafter has layers.
    """

    def __init__(
        self, model: str, drafter: str, *, max_batch: int, max_len: int, k_max: int, block_size: int, dtype: torch.dtype
    ):
        self.config = load_config(model)
        self.spec = DrafterSpec.parse(drafter)
        modelled = self.spec.modelled
        if modelled.kind == "eagle3" and modelled.head != "random":
            raise ValueError(f"drafter is {drafter!r}; a plan takes shapes alone, so eagle3:random")
        self.draft_config = load_config(modelled.model) if modelled.model else None
        self.max_batch, self.max_len, self.k_max = max_batch, max_len, k_max
        self.block_size, self.dtype = block_size, dtype
        self.layers = {"target": self.config.num_layers}
        if modelled.kind == "early-exit":
            if not 1 <= modelled.num_layers <= self.config.num_layers:
                raise ValueError(f"drafter is {drafter!r}; {model} has {self.config.num_layers} layers, so 1 to that many")
            self.layers["early-exit"] = modelled.num_layers
        if self.draft_config is not None:
            self.layers["draft-model"] = self.draft_config.num_layers
        if max_len > self.config.max_position:
            raise ValueError(f"context is {max_len}; {model} has positions for {self.config.max_position} tokens")

    @property
    def uniform(self) -> bool:
        """Whether the layers of each model are alike, so that depth can be extrapolated; an EAGLE-3 head picks some."""
        if self.spec.modelled.kind == "eagle3":
            return False
        configs = [config for config in (self.config, self.draft_config) if config is not None]
        return all(len(set(config.layer_windows)) == 1 for config in configs)

    def step(self, layers: dict[str, int] | None = None) -> SpeculativeStep:
        """The step with these numbers of layers; all of them if None."""
        layers = self.layers if layers is None else layers
        target = self._model(self.config, layers["target"])
        blocks = 1 + self.max_batch * -(-self.max_len // self.block_size)
        kv = PagedKV(target.config, num_blocks=blocks, block_size=self.block_size, dtype=self.dtype, device="meta")
        spec = self.spec
        if spec.modelled.kind == "early-exit":
            spec = spec.with_layers(layers["early-exit"])
        weights = None if self.draft_config is None else self._model(self.draft_config, layers["draft-model"])
        if spec.modelled.kind == "eagle3":
            weights = Eagle3Head(eagle3_config_for(target), dtype=self.dtype, device="meta", max_positions=self.max_len)
        state = DecodeState(
            num_slots=self.max_batch, max_len=self.max_len, block_size=self.block_size, k_max=self.k_max, device="meta"
        )
        return SpeculativeStep(target, kv, state, make_drafter(spec, target, kv, weights, self.max_batch))

    def weight_bytes(self) -> int:
        """Of target and draft model."""
        models = [self._model(config, config.num_layers) for config in (self.config, self.draft_config) if config is not None]
        return sum(weight.numel() * weight.itemsize for model in models for weight in model.parameters())

    def kv_bytes(self) -> int:
        """Of caches that hold `max_batch` requests of `max_len` tokens."""
        blocks = self.max_batch * -(-self.max_len // self.block_size)
        tokens = blocks * self.block_size
        configs = [config for config in (self.config, self.draft_config) if config is not None]
        return sum(2 * c.num_layers * tokens * c.num_kv_heads * c.head_dim * self.dtype.itemsize for c in configs)

    def _model(self, config: ModelConfig, num_layers: int) -> Transformer:
        shallow = replace(config, num_layers=num_layers, layer_windows=config.layer_windows[:num_layers])
        return Transformer(shallow, dtype=self.dtype, device="meta", max_positions=self.max_len)
