"""Hugging Face directories that transformers wrote: equal logits, and one clear sentence for each kind of damage."""

import json

import pytest
import torch
import transformers
from oracles import our_logits, transformers_logits
from safetensors.torch import load_file, save_file

from stepgraph.model.checkpoint import CheckpointError, load_model
from stepgraph.model.checkpoint.layout import parameter_views
from stepgraph.model.presets import preset
from stepgraph.model.transformer import Transformer

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 32}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}
CASES = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 12}),
    "llama-sharded": ("llama", {"sharded": True}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "llama-yarn": ("llama", {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.3, "truncate": False}}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-sharded": ("qwen2", {"tie_word_embeddings": True, "sharded": True}),
    "qwen2-window": ("qwen2", {**WINDOW, "max_window_layers": 1}),
    "qwen2-layer-types": ("qwen2", {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "qwen2-yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-window": ("qwen3", {**WINDOW, "max_window_layers": 0}),
}
TOKENS = torch.randint(0, 96, (50,), generator=torch.Generator().manual_seed(11))


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(tiny_checkpoint, case):
    family, options = CASES[case]
    directory = tiny_checkpoint(family, **options)
    assert (len(list(directory.glob("*.safetensors"))) > 1) == options.get("sharded", False)
    loaded = load_model(directory, dtype=torch.float64)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    expected = transformers_logits(theirs, TOKENS)
    # transformers takes norms and angles in float32 even in float64, which leaves about 1e-6 of the largest logit.
    for query_len in (50, 4):
        found = our_logits(loaded.model, TOKENS, query_len)
        assert (found - expected).abs().max() < 5e-6 * expected.abs().max()
    assert loaded.tokenizer is None
    assert loaded.name == directory.name
    assert loaded.load_s > 0


def test_window_case_has_power(tiny_checkpoint):
    full = load_model(tiny_checkpoint("qwen2"), dtype=torch.float64).model
    windowed = load_model(tiny_checkpoint("qwen2", **WINDOW, max_window_layers=1), dtype=torch.float64).model
    assert all(torch.equal(a, b) for a, b in zip(full.parameters(), windowed.parameters(), strict=True))
    difference = (our_logits(full, TOKENS) - our_logits(windowed, TOKENS)).abs().amax(-1)
    assert (difference[:5] < 1e-12).all()  # what sees all keys alike; a window takes another way through the CPU's products
    assert (difference[5:] > 1e-3).all()


def test_old_rope_spelling_gives_the_same_model(tiny_checkpoint):
    directory = tiny_checkpoint("llama", rope_parameters=LLAMA3)
    new = load_model(directory).model.config
    config = json.loads((directory / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"], config["rope_scaling"] = scaling.pop("rope_theta"), scaling
    (directory / "config.json").write_text(json.dumps(config))
    assert load_model(directory).model.config == new


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_conversion(tiny_checkpoint, dtype):
    directory = tiny_checkpoint("qwen3")
    stored = load_file(directory / "model.safetensors")
    model = load_model(directory, dtype=dtype).model
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    for name, view in parameter_views(model).items():
        assert torch.equal(view, stored[name].to(dtype)), name


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_views_cover_every_parameter_once(name):
    model = Transformer(preset(name))
    for weight in model.parameters():
        weight.data.zero_()
    for view in parameter_views(model).values():
        view += 1
    assert all((weight == 1).all() for weight in model.parameters())


def test_generation_config_adds_eos_ids(tiny_checkpoint):
    directory = tiny_checkpoint("llama", eos_token_id=[2, 4])
    (directory / "generation_config.json").write_text('{"eos_token_id": [9, 4]}')
    assert load_model(directory).model.config.eos_token_ids == (2, 4, 9)


def test_harmless_extras_are_ignored(tiny_checkpoint):
    directory = tiny_checkpoint("llama", tie_word_embeddings=True)
    rewrite(directory, lambda t: t.update({"lm_head.weight": torch.zeros(96, 32)}))
    rewrite(directory, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    load_model(directory)


def rewrite(directory, change) -> None:
    """Apply `change` to the tensors of a single-file checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def missing_shard(directory):
    sorted(directory.glob("*.safetensors"))[1].unlink()


def truncated_shard(directory):
    path = sorted(directory.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])


def garbage_shard(directory):
    sorted(directory.glob("*.safetensors"))[0].write_bytes(b"<html>not found</html>")


def index_names_another_tensor(directory):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))


def index_leaves_the_directory(directory):
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../model.safetensors"
    path.write_text(json.dumps(index))


def index_is_not_json(directory):
    (directory / "model.safetensors.index.json").write_text('{"weight_map": ')


def index_is_missing(directory):
    (directory / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing_shard, r"lacks model-00002-of-\d+\.safetensors, which model\.safetensors\.index\.json lists"),
        (truncated_shard, r"model-00002-of-\d+\.safetensors is damaged or truncated"),
        (garbage_shard, r"model-00001-of-\d+\.safetensors is damaged or truncated"),
        (index_names_another_tensor, r"lacks tensor model\.extra, which model\.safetensors\.index\.json places there"),
        (index_leaves_the_directory, r"places tensor model\.norm\.weight in '\.\./model\.safetensors'"),
        (index_is_not_json, r"model\.safetensors\.index\.json is not valid JSON"),
        (index_is_missing, r"has neither model\.safetensors nor model\.safetensors\.index\.json"),
    ],
)
def test_damaged_shards(tiny_checkpoint, damage, message):
    directory = tiny_checkpoint("llama", sharded=True)
    damage(directory)
    with pytest.raises(CheckpointError, match=message):
        load_model(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"tensor model\.norm\.weight missing"),
        (
            lambda t: [t.pop(f"model.layers.1.self_attn.{n}_proj.weight") for n in "qk"],
            r"tensor model\.layers\.1\.self_attn\.q_proj\.weight and 1 more missing",
        ),
        (lambda t: t.pop("lm_head.weight"), r"tensor lm_head\.weight missing"),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(47, 32)}),
            r"model\.layers\.0\.mlp\.up_proj\.weight .* has shape \(47, 32\), the config asks for \(48, 32\)",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
            r"model\.layers\.0\.self_attn\.q_proj\.bias in model\.safetensors is unexpected",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
            r"model\.norm\.weight in model\.safetensors is torch\.int8",
        ),
    ],
)
def test_damaged_tensors(tiny_checkpoint, change, message):
    directory = tiny_checkpoint("llama")
    rewrite(directory, change)
    with pytest.raises(CheckpointError, match=message):
        load_model(directory)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, r"config\.json cannot be read: No such file"),
        ("config.json", "{", r"config\.json is not valid JSON"),
        ("config.json", "[]", r"config\.json holds a list"),
        ("config.json", '{"model_type": "mamba"}', r"model_type is 'mamba'"),
        ("generation_config.json", "nonsense", r"generation_config\.json is not valid JSON"),
    ],
)
def test_damaged_configs(tiny_checkpoint, file, content, message):
    directory = tiny_checkpoint("llama")
    (directory / file).unlink(missing_ok=True)
    if content is not None:
        (directory / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load_model(directory)
