"""The public EAGLE-3 layout: what is written is read back, what others write is read, and damage gets one clear sentence."""

import json
import shutil

import pytest
import torch
from oracles import our_logits
from safetensors.torch import load_file, save_file
from worlds import tiny_head, tiny_model

from stepgraph.model.checkpoint import CheckpointError
from stepgraph.model.checkpoint.eagle3 import (
    eagle3_config_for,
    eagle3_views,
    load_eagle3,
    random_eagle3,
    save_eagle3,
)
from stepgraph.model.checkpoint.shipped import shipped_head
from stepgraph.model.config import RopeConfig
from stepgraph.model.drafters import default_drafter
from stepgraph.model.eagle3_head import Eagle3Head, default_feature_layers
from stepgraph.model.presets import PRESETS
from stepgraph.model.transformer import Transformer

LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 8192, 1.0, 4.0)
YARN = RopeConfig(1e6, "yarn", 4.0, 128, mscale=0.9, mscale_all_dim=0.4, truncate=False)


def public_tensors(config: dict, seed: int = 0, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """The tensors of a head as the public checkpoints have them, written without any of our own code."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {
        "fc.weight": (hidden, 3 * config.get("target_hidden_size", hidden)),
        "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    if config["model_type"] == "qwen3":
        shapes |= {"midlayer.self_attn.q_norm.weight": (dim,), "midlayer.self_attn.k_norm.weight": (dim,)}
    tensors = {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}
    chosen = torch.randperm(config["vocab_size"], generator=generator)[: config["draft_vocab_size"]].sort().values
    tensors["d2t"] = chosen - torch.arange(len(chosen))
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, chosen, True)
    return tensors


def public_config(model_type: str = "llama", **changes) -> dict:
    fields = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": model_type, "hidden_size": 32, "intermediate_size": 40,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "max_position_embeddings": 256, "rope_theta": 10000.0, "vocab_size": 61, "draft_vocab_size": 24,
        "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    return fields | changes


def write(directory, config: dict, tensors: dict) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")


def by_hand(tensors: dict, config: dict, features, embedded) -> torch.Tensor:
    """Draft logits `[T, D]` from the formula, dense, in float64; `features [T, 3 hidden]`, `embedded [T, hidden]`."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    heads, kv, dim, eps = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"], 1e-6

    def norm(x, name):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w[f"{name}.weight"]

    f = features @ w["fc.weight"].T
    inputs = torch.cat([norm(embedded, "midlayer.input_layernorm"), norm(f, "midlayer.hidden_norm")], -1)
    residual = norm(f, "midlayer.hidden_norm") if config.get("norm_before_residual") else f
    q, k, v = (
        (inputs @ w[f"midlayer.self_attn.{n}_proj.weight"].T).view(len(f), count, dim)
        for n, count in (("q", heads), ("k", kv), ("v", kv))
    )
    if config["model_type"] == "qwen3":
        q, k = norm(q, "midlayer.self_attn.q_norm"), norm(k, "midlayer.self_attn.k_norm")
    inv = 1.0 / (config["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim))
    angles = (torch.arange(len(f)).float()[:, None] * inv).to(torch.float64)[:, None]
    # The product's RoPE table is in float32; so is this.
    cos, sin = angles.float().cos().double(), angles.float().sin().double()

    def rotate(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = rotate(q), rotate(k).repeat_interleave(heads // kv, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
    scores = scores.masked_fill(torch.ones(len(f), len(f)).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.repeat_interleave(heads // kv, 1)).flatten(1)
    x = residual + mixed @ w["midlayer.self_attn.o_proj.weight"].T
    y = norm(x, "midlayer.post_attention_layernorm")
    gated = torch.nn.functional.silu(y @ w["midlayer.mlp.gate_proj.weight"].T) * (y @ w["midlayer.mlp.up_proj.weight"].T)
    return norm(x + gated @ w["midlayer.mlp.down_proj.weight"].T, "norm") @ w["lm_head.weight"].T


@pytest.mark.parametrize(
    ("target_family", "model_type", "changes"),
    [
        ("llama", "llama", {}),
        ("qwen3", "llama", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}),
        ("qwen3", "qwen3", {}),
        ("llama", "llama", {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}),
    ],
)
def test_a_public_checkpoint_computes_the_formula(tmp_path, target_family, model_type, changes):
    from worlds import place, tiny_step

    target = tiny_model(0, target_family, num_layers=4)
    config = public_config(model_type, **changes)
    tensors = public_tensors(config)
    write(tmp_path / "head", config, tensors)
    head = load_eagle3(tmp_path / "head", target)
    expected_layers = (1, 2, 4) if len(changes) else default_feature_layers(4)
    assert head.eagle.feature_layers == expected_layers
    assert torch.equal(head.target_ids, torch.arange(24) + tensors["d2t"])

    step = tiny_step("eagle3:tiny", model=target)
    step.drafter.head, step.drafter.feature_layers, step.feature_layers = head, expected_layers, expected_layers
    tokens, seen = [5, 6, 7, 8, 9, 3], []
    fuse, forward = head.fuse, head.forward
    head.fuse = lambda features: (seen.append(features[0]), fuse(features))[1]
    out = []
    head.forward = lambda *args: (out.append(forward(*args)), out[-1])[1]
    place(step, 0, tokens)
    with torch.no_grad():
        logits = head.logits(out[0])[0]
    expected = by_hand(tensors, config, seen[0], target.embed.data[tokens[1:]])
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rope", [RopeConfig(1e5), RopeConfig(1e4, "linear", 4.0), LLAMA3, YARN])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_what_is_written_is_read_back(tmp_path, family, rope):
    target = tiny_model(0, family, dtype=torch.float32, num_layers=6)
    head = tiny_head(target, 3, rope=rope, family=family, qk_norm=family == "qwen3", intermediate_size=80)
    save_eagle3(head, tmp_path / "head", torch.float32)
    again = load_eagle3(tmp_path / "head", target)
    assert again.eagle == head.eagle
    for name, view in eagle3_views(head).items():
        assert torch.equal(view, eagle3_views(again)[name]), name
    assert torch.equal(again.target_ids, head.target_ids)
    assert torch.equal(again.rope, head.rope[: again.max_positions])


def test_the_file_is_in_bfloat16_and_has_the_public_names(tmp_path):
    target = tiny_model(0, dtype=torch.float32)
    save_eagle3(tiny_head(target), tmp_path / "head")
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert set(tensors) == set(public_tensors(public_config()))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16, torch.int64, torch.bool}
    assert (tensors["d2t"] + torch.arange(40)).tolist() == [token for token in range(61) if token % 3]


def test_other_spellings_are_read(tmp_path):
    target, config = tiny_model(0), public_config()
    tensors = public_tensors(config)
    write(tmp_path / "a", config, tensors)
    renamed = {name.replace("midlayer.", "model.layers.0."): tensor for name, tensor in tensors.items()}
    write(tmp_path / "b", config, renamed)
    first, second = (eagle3_views(load_eagle3(tmp_path / name, target)) for name in "ab")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_head_may_use_the_targets_output_rows_and_its_own_embeddings(tmp_path):
    target, config = tiny_model(0), public_config()
    tensors = public_tensors(config, dtype=torch.float64)
    del tensors["lm_head.weight"]
    tensors["embed_tokens.weight"] = torch.randn(61, 32, dtype=torch.float64)
    write(tmp_path / "head", config, tensors)
    head = load_eagle3(tmp_path / "head", target)
    assert torch.equal(head.lm_head, target.lm_head[head.target_ids])
    assert torch.equal(head.embed, tensors["embed_tokens.weight"])


def test_a_narrow_head_for_a_wide_target(tmp_path):
    target = tiny_model(0, hidden_size=48)
    config = public_config(target_hidden_size=48)
    tensors = public_tensors(config)
    write(tmp_path / "head", config, tensors)
    with pytest.raises(CheckpointError, match="token embeddings of its own"):
        load_eagle3(tmp_path / "head", target)
    write(tmp_path / "head", config, tensors | {"embed_tokens.weight": torch.randn(61, 32)})
    assert load_eagle3(tmp_path / "head", target).fc_weight.shape == (32, 144)


def spoil_config(**changes):
    def spoil(directory, config, tensors):
        write(directory, config | changes, tensors)

    return spoil


def spoil_tensors(change):
    def spoil(directory, config, tensors):
        write(directory, config, change(dict(tensors)))

    return spoil


def without(name):
    return spoil_tensors(lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name})


def replaced(name, tensor):
    return spoil_tensors(lambda tensors: tensors | {name: tensor})


def truncate(directory, config, tensors):
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_config(vocab_size=60), "head is for a vocabulary of 60 tokens, the target has 61"),
        (spoil_config(hidden_size=64), "head is for a target of hidden size 64, this one has 32"),
        (spoil_config(target_hidden_size=40), "head is for a target of hidden size 40, this one has 32"),
        (spoil_config(draft_vocab_size=25), "d2t is torch.int64 of shape .24,.; allowed: 25 integers"),
        (spoil_config(draft_vocab_size=62), "draft_vocab_size=62; allowed is 1 to the vocabulary's 61"),
        (spoil_config(draft_vocab_size="many"), "draft_vocab_size is 'many'"),
        (spoil_config(num_hidden_layers=2), "head has one decoder layer"),
        (spoil_config(model_type="gemma"), "model_type is 'gemma'"),
        (spoil_config(speculators_model_type="eagle3"), "speculators"),
        (spoil_config(norm_before_fc=True), "norm_before_fc is True"),
        (spoil_config(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is false"),
        (
            spoil_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}),
            "layers .1, 2, 5.; the target has 4 layers",
        ),
        (
            spoil_config(eagle_aux_hidden_state_layer_ids=[0, 1]),
            "fc.weight .* has shape .32, 96., the config asks for .32, 64.",
        ),
        (
            spoil_config(
                eagle_aux_hidden_state_layer_ids=[1, 2, 3], eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
            ),
            "name different layers",
        ),
        (without("fc.weight"), "fc.weight missing"),
        (without("midlayer.self_attn.k_proj.weight"), "k_proj.weight missing"),
        (without("d2t"), "d2t is missing; draft_vocab_size is 24 of 61 tokens"),
        (replaced("d2t", torch.zeros(24)), "d2t is torch.float32"),
        (replaced("d2t", torch.full((24,), 60)), "d2t does not name 24 different tokens"),
        (replaced("d2t", -torch.arange(24)), "d2t does not name 24 different tokens"),
        (replaced("t2d", torch.ones(61, dtype=torch.bool)), "t2d does not mark the tokens that d2t names"),
        (replaced("midlayer.mlp.bias", torch.zeros(3)), "midlayer.mlp.bias .* unexpected"),
        (replaced("norm.weight", torch.zeros(3)), "norm.weight .* has shape"),
        (replaced("norm.weight", torch.zeros(32, dtype=torch.int8)), "only float weights"),
        (truncate, "damaged or truncated"),
        (lambda directory, *_: (directory / "model.safetensors").unlink(), "has neither model.safetensors nor"),
        (lambda directory, *_: (directory / "config.json").unlink(), "config.json cannot be read"),
        (lambda directory, *_: (directory / "config.json").write_text("{"), "not valid JSON"),
        (lambda directory, *_: shutil.rmtree(directory), "is no directory"),
    ],
)
def test_damage_is_named_in_one_sentence(tmp_path, spoil, message):
    config = public_config()
    directory, tensors = tmp_path / "the-head", public_tensors(config)
    write(directory, config, tensors)
    spoil(directory, config, tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_eagle3(directory, tiny_model(0, num_layers=4))
    assert "the-head" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shapes_of_a_head_for_an_8b_target():
    """Those of the public heads for Llama 3.1 8B: no weights are made."""
    with torch.device("meta"):
        target = Transformer(PRESETS["llama-3.1-8b"], dtype=torch.bfloat16, device="meta", max_positions=16)
        head = Eagle3Head(eagle3_config_for(target), dtype=torch.bfloat16, device="meta", max_positions=16)
    assert head.lm_head.shape == (32_000, 4096)
    assert head.fc_weight.shape == (4096, 3 * 4096)
    assert head.layer.qkv_weight.shape == ((32 + 2 * 8) * 128, 2 * 4096)
    assert head.eagle.feature_layers == (2, 16, 29)
    # The published head of this target has 425 M parameters, its embeddings not counted.
    assert 380e6 < sum(weight.numel() for weight in head.parameters()) < 450e6


def test_random_head_follows_the_target():
    target = Transformer(PRESETS["tiny-qwen3"], dtype=torch.bfloat16).randomize()
    head = random_eagle3(target)
    assert (head.dtype, head.max_positions) == (torch.bfloat16, 512)
    assert head.target_ids.tolist() == list(range(256))
    assert our_logits(target, torch.arange(4), 4).isfinite().all()


def test_the_shipped_head_and_its_card():
    folder = shipped_head("smollm2-135m")
    card = json.loads((folder / "card.json").read_text())
    assert card["target"] == "smollm2-135m"
    assert (folder / "model.safetensors").stat().st_size == card["head"]["bytes"] <= 25e6
    tensors = load_file(folder / "model.safetensors")
    assert tensors["d2t"].shape == (card["head"]["draft_vocab_size"],)
    assert tensors["t2d"].sum() == card["head"]["draft_vocab_size"]
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert default_drafter("smollm2-135m") == "hybrid"
    assert default_drafter("mine") == "ngram"


def test_no_head_is_shipped_for_an_unknown_target():
    with pytest.raises(CheckpointError, match="there is no EAGLE-3 head for 'mine'"):
        shipped_head("mine")
