"""Fixtures shared by all floors: the embedded model, tiny checkpoints on disk, and the rule for GPU tests."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# Tests read local files only; without this, transformers asks the hub about a directory it has just written.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser):
    parser.addoption("--whole", action="store_true", help="comparisons at full length, as `make lossless` runs them")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def embedded():
    """The embedded SmolLM2-135M-Instruct in float32: a `LoadedModel` with a RoPE table of 2048 positions."""
    from stepgraph.model.checkpoint import CheckpointError, load_model

    try:
        return load_model("smollm2-135m", max_positions=2048)
    except CheckpointError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """`tiny_checkpoint(family, sharded=False, **config)`: a directory that transformers wrote, with every weight random.

    `config` overrides fields of the tiny configuration of `oracles.tiny_transformers`. The directory is the caller's own.
    """
    from oracles import tiny_transformers

    def write(family: str, *, sharded: bool = False, **config) -> Path:
        directory = tmp_path_factory.mktemp(family)
        model = tiny_transformers(family, **config)
        model.save_pretrained(directory, max_shard_size="40KB" if sharded else "5GB")
        return directory

    return write
