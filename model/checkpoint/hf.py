"""Hugging Face checkpoints: `config.json` and safetensors, from a local directory or from the hub."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stepgraph.model.checkpoint.config import config_from_hf
from stepgraph.model.checkpoint.errors import CheckpointError
from stepgraph.model.checkpoint.layout import Filler, parameter_views
from stepgraph.model.transformer import Transformer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file is missing, is not JSON or holds no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def load_hf(directory: Path, **options: Any) -> Transformer:
    """A transformer with the weights of a Hugging Face directory.

    Args:
        directory: holds `config.json` and `model.safetensors`, or shards with `model.safetensors.index.json`.
        **options: those of `Transformer` (dtype, device, max_positions, invariant_linear).

    Raises:
        CheckpointError: a file or tensor is missing, damaged, unexpected or of another shape, or the model is not supported.
    """
    generation = directory / "generation_config.json"
    config = config_from_hf(read_json(directory / "config.json"), read_json(generation) if generation.exists() else None)
    shards = weight_files(directory)
    model = Transformer(config, **options)
    filler = Filler(parameter_views(model), directory.name, tied=model.lm_head is None)
    for file, expected in shards.items():
        for name, tensor in _tensors(directory / file, filler, expected):
            filler.fill(name, tensor, file)
    filler.finish()
    return model


def weight_files(directory: Path) -> dict[str, set[str] | None]:
    """Weight files, each with the tensors the index says it has (None where there is no index)."""
    if (directory / SINGLE_FILE).exists():
        return {SINGLE_FILE: None}
    if not (directory / INDEX_FILE).exists():
        raise CheckpointError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors weights are read")
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{directory / INDEX_FILE} has no weight_map")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{directory / INDEX_FILE} places tensor {name} in {file!r}, which is no file name")
        shards.setdefault(file, set()).add(name)
    for file in shards:
        if not (directory / file).exists():
            raise CheckpointError(f"{directory} lacks {file}, which {INDEX_FILE} lists")
    return shards


def _tensors(path: Path, filler: Filler, expected: set[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one safetensors file that the model wants, read one at a time."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = list(file.keys())
            absent = sorted((expected or set()) - set(names))
            if absent:
                raise CheckpointError(f"{path} lacks tensor {absent[0]}, which {INDEX_FILE} places there")
            for name in names:
                if filler.wants(name, path.name):
                    yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or truncated: {error}") from error


def download(repo: str) -> Path:
    """Local directory of a hub repository's config, tokenizer and safetensors files, fetched if they are not cached.

    Raises:
        CheckpointError: the repository cannot be fetched (offline, no such repository, no permission).
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=list(HUB_PATTERNS)))
    except Exception as error:  # the hub's transport errors share no base class across its versions
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{repo!r} is no local directory, and could not be fetched from the Hugging Face hub: {reason}"
        ) from error
