"""Tiny models, steps and engines for the tests, and drafters that say what they are told."""

import torch
from torch import Tensor

from stepgraph.capture.state import DecodeState
from stepgraph.capture.step import SpeculativeStep
from stepgraph.model.checkpoint.eagle3 import eagle3_config_for
from stepgraph.model.config import ModelConfig, RopeConfig
from stepgraph.model.drafters import Drafter, DrafterSpec, EarlyStop, Proposal, StepRows, make_drafter
from stepgraph.model.eagle3_head import Eagle3Head
from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.transformer import Transformer

VOCAB = 61


def tiny_config(family: str = "llama", **changes) -> ModelConfig:
    options = {
        "family": family,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(),
        "max_position": 512,
        "tie_embeddings": family == "qwen2",
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
    }
    return ModelConfig(**(options | changes))


def tiny_model(seed: int = 0, family: str = "llama", dtype=torch.float64, invariant: bool = False, **changes) -> Transformer:
    return Transformer(tiny_config(family, **changes), dtype=dtype, invariant_linear=invariant).randomize(seed)


def tiny_head(
    target: Transformer, seed: int = 0, draft_vocab: int | None = None, max_positions: int | None = None, **changes
) -> Eagle3Head:
    """A head with random weights; its draft vocabulary leaves out every third token, or is the first `draft_vocab`."""
    vocab = target.config.vocab_size
    ids = list(range(draft_vocab)) if draft_vocab else [token for token in range(vocab) if token % 3]
    options = {"dtype": target.dtype, "device": target.device, "invariant_linear": target.invariant_linear}
    config = eagle3_config_for(target, len(ids), **changes)
    head = Eagle3Head(config, max_positions=max_positions, **options).randomize(seed)
    head.target_ids.copy_(torch.tensor(ids))
    return head


def tiny_step(
    drafter: str | Drafter = "none",
    *,
    model: Transformer | None = None,
    num_slots: int = 4,
    max_len: int = 64,
    k_max: int = 5,
    block_size: int = 4,
    draft_seed: int = 0,
    early_stop: str | None = None,
) -> SpeculativeStep:
    """A step whose slot s owns the blocks s * M + 1 .. (s + 1) * M. `draft-model:tiny` is a model of another seed,
    `eagle3:tiny` a head of random weights that can propose about two thirds of the tokens.
    """
    model = model or tiny_model()
    per_slot = -(-max_len // block_size)
    device = model.device
    kv = PagedKV(model.config, num_blocks=num_slots * per_slot + 1, block_size=block_size, dtype=model.dtype, device=device)
    state = DecodeState(num_slots=num_slots, max_len=max_len, block_size=block_size, k_max=k_max, device=device)
    if isinstance(drafter, str):
        spec, weights = DrafterSpec.parse(drafter), None
        if spec.modelled.kind == "draft-model":
            weights = tiny_model(draft_seed, model.config.family, model.dtype).to(device)
        elif spec.modelled.kind == "eagle3":
            weights = tiny_head(model, draft_seed)
        stop = None if early_stop is None else EarlyStop.parse(early_stop)
        drafter = make_drafter(spec, model, kv, weights, num_slots, stop)
    return SpeculativeStep(model, kv, state, drafter)


def place(
    step: SpeculativeStep,
    slot: int,
    prompt: list[int],
    *,
    limit: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    draft_limit: int = 99,
    stop_ids: tuple[int, ...] = (),
) -> None:
    """Put a request with a whole block table into a slot and prefill it."""
    state, kv = step.state, step.kv
    state.clear_slot(slot)
    per_slot = state.block_table.shape[1]
    state.block_table[slot] = torch.arange(per_slot) + 1 + slot * per_slot
    assert int(state.block_table[slot].max()) < kv.num_blocks
    state.history[slot, : len(prompt)] = torch.tensor(prompt)
    state.last_token[slot], state.seq_len[slot] = prompt[-1], len(prompt) - 1
    state.limit[slot] = state.max_len if limit is None else limit
    state.draft_limit[slot], state.temperature[slot], state.seed[slot] = draft_limit, temperature, seed
    for i, stop_id in enumerate(stop_ids):
        state.stop_ids[slot, i] = stop_id
    if len(prompt) > 1:
        with torch.no_grad():
            step.prefill(slot, prompt[:-1], 0)


def run(step: SpeculativeStep, slots: list[int], k: int) -> None:
    """One eager step."""
    step.state.set_rows(slots)
    with torch.no_grad():
        step(len(slots), k)


def text(step: SpeculativeStep, slot: int) -> list[int]:
    """All committed tokens of a slot."""
    return step.state.tokens(slot, 0, int(step.state.seq_len[slot]) + 1)


def committed_kv(step: SpeculativeStep, slot: int, kv: PagedKV | None = None) -> Tensor:
    """`[layers, 2, seq_len, KV, D]`: what the cache holds at the committed positions of a slot."""
    kv = kv or step.kv
    flat = kv.storage[:, :, step.state.block_table[slot]].flatten(2, 3)
    return flat[:, :, : int(step.state.seq_len[slot])]


def snapshot(step: SpeculativeStep) -> dict[str, Tensor]:
    """Copies of everything a step may write."""
    return {name: buffer.clone() for name, buffer in step.named_buffers()}


class ScriptedDrafter(Drafter):
    """Proposes `script[slot, position]` for each position, one-hot; −1 there means "no draft"."""

    name = "scripted"

    def __init__(self, num_slots: int, max_len: int):
        super().__init__()
        self.register_buffer("script", torch.full((num_slots + 1, max_len), -1), persistent=False)

    def propose(self, rows: StepRows, k: int) -> Proposal:
        positions = (rows.seq_len[:, None] + 1 + torch.arange(k)).clamp(max=self.script.shape[1] - 1)
        return Proposal(self.script[rows.slots].gather(1, positions), None)
