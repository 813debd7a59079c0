"""Public EAGLE-3 checkpoints: `config.json` and one safetensors file, in the layout of SafeAILab/EAGLE, SpecForge and vLLM.

    fc.weight  midlayer.{hidden_norm,input_layernorm,post_attention_layernorm}.weight  midlayer.self_attn.{q,k,v,o}_proj.weight
    midlayer.mlp.{gate,up,down}_proj.weight  norm.weight  lm_head.weight  [embed_tokens.weight]
    d2t [D] int64: target id − draft id        t2d [V] bool: whether a target token is in the draft vocabulary

`midlayer` may be called `layers.0`, and a prefix `model.` is ignored. A head of the target's width may leave out `lm_head`
(an extension: other engines expect it): its output rows are then the target's own.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stepgraph.model.checkpoint.eagle3_config import eagle3_from_hf, eagle3_to_hf
from stepgraph.model.checkpoint.errors import CheckpointError
from stepgraph.model.checkpoint.hf import SINGLE_FILE, read_json, weight_files
from stepgraph.model.checkpoint.layout import Filler, layer_views
from stepgraph.model.eagle3_head import Eagle3Config, Eagle3Head, default_feature_layers
from stepgraph.model.transformer import Transformer

LARGEST_DRAFT_VOCAB = 32_000  # what the public heads of 8B-class targets have


def load_eagle3(directory: Path, target: Transformer) -> Eagle3Head:
    """The head of a directory, for `target`, in its dtype and on its device.

    Raises:
        CheckpointError: a file or tensor is missing, damaged or unexpected, or the head was made for another target.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; an EAGLE-3 head is one with config.json and {SINGLE_FILE}")
    try:
        config_fields, tensors = read_json(directory / "config.json"), _read_tensors(directory)
        config = eagle3_from_hf(config_fields, target.config, "embed_tokens.weight" in tensors)
    except CheckpointError as error:
        message = str(error)
        raise error if directory.name in message else CheckpointError(f"{directory.name}: {message}") from error
    head = Eagle3Head(config, **_like(target, config.decoder.max_position))
    head.target_ids.copy_(_target_ids(tensors, config, directory.name))
    filler = Filler(eagle3_views(head), directory.name)
    if "lm_head.weight" not in tensors and config.decoder.hidden_size == target.config.hidden_size:
        tensors["lm_head.weight"] = target.output_rows.data[head.target_ids]
    for name, tensor in tensors.items():
        if name not in ("d2t", "t2d") and filler.wants(name, SINGLE_FILE):
            filler.fill(name, tensor, SINGLE_FILE)
    filler.finish()
    return head.eval()


def random_eagle3(target: Transformer, seed: int = 0) -> Eagle3Head:
    """A head with random weights whose shapes are those of the public heads for such a target: one layer like the target's
    own, a draft vocabulary of at most 32,000. For the plan and for timing; it is nearly never right.
    """
    head = Eagle3Head(eagle3_config_for(target), **_like(target, target.max_positions))
    return head.randomize(seed).eval()


def eagle3_config_for(target: Transformer, draft_vocab_size: int = LARGEST_DRAFT_VOCAB, **decoder: Any) -> Eagle3Config:
    """Shapes of a head for a target: a Llama layer with the target's sizes, changed by `decoder` (fields of `ModelConfig`)."""
    config = target.config
    plain = {"family": "llama", "num_layers": 1, "layer_windows": (), "tie_embeddings": False}
    biases = {"qkv_bias": False, "output_bias": False, "mlp_bias": False, "qk_norm": False}
    return Eagle3Config(
        decoder=dataclasses.replace(config, **(plain | biases | decoder)),
        draft_vocab_size=min(draft_vocab_size, config.vocab_size),
        target_hidden_size=config.hidden_size,
        feature_layers=default_feature_layers(config.num_layers),
    )


def save_eagle3(head: Eagle3Head, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a head in the public layout, with all its tensors, into `directory` (made if need be)."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: view.to("cpu", dtype).contiguous() for name, view in eagle3_views(head).items()}
    target_ids = head.target_ids.cpu()
    tensors["d2t"] = target_ids - torch.arange(len(target_ids))
    tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, target_ids, True)
    config = eagle3_to_hf(head.eagle, str(dtype).removeprefix("torch."))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})


def eagle3_views(head: Eagle3Head) -> dict[str, Tensor]:
    """Views that cover every weight of the head exactly once, by the name their tensor has in a checkpoint."""
    views = {f"midlayer.{name}": view for name, view in layer_views(head.layer)}
    views |= {
        "midlayer.hidden_norm.weight": head.layer.hidden_norm.data,
        "fc.weight": head.fc_weight.data,
        "norm.weight": head.norm.data,
        "lm_head.weight": head.lm_head.data,
    }
    return views if head.embed is None else views | {"embed_tokens.weight": head.embed.data}


def _like(target: Transformer, max_position: int) -> dict[str, Any]:
    return {
        "dtype": target.dtype,
        "device": target.device,
        "max_positions": min(max_position, target.max_positions),
        "invariant_linear": target.invariant_linear,
    }


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of the checkpoint, by their name in the layout above."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(directory):
        try:
            with safe_open(directory / file, framework="pt", device="cpu") as opened:
                for stored in opened.keys():  # noqa: SIM118 - not a dictionary
                    name = stored.removeprefix("model.")
                    name = f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
                    if name in tensors:
                        raise CheckpointError(f"{directory.name}: tensor {name} is in the checkpoint twice")
                    tensors[name] = opened.get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{directory / file} is damaged or truncated: {error}") from error
    return tensors


def _target_ids(tensors: dict[str, Tensor], config: Eagle3Config, source: str) -> Tensor:
    """`[D]` int64 target ids from `d2t`, which must name D tokens of the vocabulary, and those that `t2d` marks."""
    draft, vocab = config.draft_vocab_size, config.decoder.vocab_size
    d2t = tensors.get("d2t", None if config.reduced else torch.zeros(draft, dtype=torch.int64))
    if d2t is None:
        raise CheckpointError(f"{source}: tensor d2t is missing; draft_vocab_size is {draft} of {vocab} tokens")
    if d2t.shape != (draft,) or d2t.is_floating_point():
        raise CheckpointError(f"{source}: tensor d2t is {d2t.dtype} of shape {tuple(d2t.shape)}; allowed: {draft} integers")
    ids = torch.arange(draft) + d2t.to(torch.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(ids.unique()) < draft:
        raise CheckpointError(f"{source}: tensor d2t does not name {draft} different tokens of a vocabulary of {vocab}")
    if not config.reduced and bool(d2t.any()):
        raise CheckpointError(f"{source}: tensor d2t permutes a vocabulary that is not reduced")
    t2d = tensors.get("t2d")
    if t2d is not None:
        named = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
        if t2d.shape != (vocab,) or not torch.equal(t2d.to(torch.bool), named):
            raise CheckpointError(f"{source}: tensor t2d does not mark the tokens that d2t names")
    return ids
