"""GGUF files: synthetic ones written by the gguf package, damaged ones, and the embedded model."""

import gguf
import numpy as np
import pytest
import torch
from oracles import our_logits

from stepgraph.model.checkpoint import CheckpointError, load_model
from stepgraph.model.checkpoint.embedded import embedded_path
from stepgraph.model.checkpoint.gguf_file import GGUFFile
from stepgraph.model.checkpoint.layout import parameter_views
from stepgraph.model.config import ModelConfig, RopeConfig
from stepgraph.model.rope import inverse_frequencies
from stepgraph.model.transformer import Transformer

NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
F32 = gguf.GGMLQuantizationType.F32


def tiny_model(**changes) -> Transformer:
    fields = dict(
        family="llama",
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=50_000.0),
        max_position=128,
        tie_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    return Transformer(ModelConfig(**{**fields, **changes})).randomize(seed=7)


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    shape = (heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model: Transformer, kind=F32, *, skip=(), extra=None, metadata=None, architecture="llama"):
    """Write `model` as llama.cpp's converter would; matrices in `kind`, vectors in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_ids[0])
    if config.rope.type == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope.factor)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))

    tensors = {}
    for name, view in parameter_views(model).items():
        *rest, module, suffix = name.split(".")
        array = view.numpy()
        if module in ("q_proj", "k_proj"):
            array = llama_cpp_permute(array, config.num_heads if module == "q_proj" else config.num_kv_heads)
        tensors[f"blk.{rest[2]}.{NAMES[module]}.{suffix}" if "layers" in rest else f"{NAMES[module]}.{suffix}"] = array
    tensors.update(extra or {})
    for name, array in tensors.items():
        if name not in skip:
            array = np.ascontiguousarray(array)
            if array.ndim == 1 or kind == F32:
                writer.add_tensor(name, array)
            else:
                writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "plain.gguf", tiny_model())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
        {"num_kv_heads": 4},
        {"rope": RopeConfig(theta=10_000.0, type="linear", factor=4.0)},
    ],
)
def test_float32_file_gives_back_the_model(tmp_path, changes):
    model = tiny_model(**changes)
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf", model))
    assert loaded.model.config == model.config
    assert (loaded.name, loaded.tokenizer) == ("tiny", None)
    for (name, found), expected in zip(loaded.model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected), name
    tokens = torch.arange(40)
    assert torch.equal(our_logits(loaded.model, tokens), our_logits(model, tokens))


def test_llama3_scaling_is_recognised(tmp_path):
    rope = RopeConfig(theta=500_000.0, type="llama3", factor=8.0, original_max_position=8192)
    model = tiny_model(rope=rope)
    plain = RopeConfig(theta=500_000.0)
    divisors = (inverse_frequencies(16, plain)[0] / inverse_frequencies(16, rope)[0]).numpy()
    path = write_gguf(tmp_path / "llama3.gguf", model, extra={"rope_freqs.weight": divisors})
    assert load_model(path).model.config == model.config
    path = write_gguf(tmp_path / "other.gguf", model, extra={"rope_freqs.weight": divisors[::-1]})
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not the scaling of Llama 3\.1"):
        load_model(path)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantized_matrices_equal_gguf(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(), kind)
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    assert set(file.tensors) == {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert file.tensors[tensor.name].shape == expected.shape
        assert np.array_equal(file.tensor(tensor.name), expected), tensor.name
    load_model(path)


def test_metadata_equals_gguf_reader(tmp_path):
    extra = {
        "a.string": "h\u00e9",
        "a.bool": True,
        "a.float": 0.5,
        "a.int": -3,
        "strings": ["x", "", "\u4e16"],
        "ints": [1, -2],
    }
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(), metadata=extra)
    expected = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items() if not key.startswith("GGUF.")}
    assert GGUFFile(path).metadata == expected
    assert expected.items() >= extra.items()


def test_every_truncation_is_reported(plain_file, tmp_path):
    content = plain_file.read_bytes()
    cuts = sorted({*range(0, 2000, 37), *range(2000, len(content), len(content) // 20), len(content) - 1})
    for cut in cuts:
        path = tmp_path / "cut.gguf"
        path.write_bytes(content[:cut])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            load_model(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a GGUF file"),
        (b"PK\x03\x04 a zip file", "is not a GGUF file"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "is GGUF version 1; allowed: 2, 3"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"none\.gguf cannot be read as a GGUF file"):
        load_model(tmp_path / "none.gguf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma"}, r"general\.architecture is 'gemma'; allowed: llama"),
        ({"skip": ["blk.1.ffn_up.weight"]}, r"tensor model\.layers\.1\.mlp\.up_proj\.weight missing"),
        ({"extra": {"blk.0.ffn_gate_inp.weight": np.zeros((4, 64), "f4")}}, r"blk\.0\.ffn_gate_inp\.weight .* is unexpected"),
        ({"extra": {"blk.0.ffn_up.weight": np.zeros((64, 64), "f4")}}, r"up_proj\.weight .* shape \(64, 64\)"),
        ({"metadata": {"llama.expert_count": 8}}, r"llama\.expert_count is 8; allowed is none"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, r"llama\.rope\.scaling\.type is 'yarn'; allowed: none, linear"),
        ({"metadata": {"llama.attention.key_length": 32}}, r"llama\.rope\.dimension_count is 16; allowed is the head size, 32"),
        ({"metadata": {"tokenizer.ggml.model": "llama"}}, r"tokenizer\.ggml\.model is 'llama'; allowed: gpt2"),
        (
            {"metadata": {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken"}},
            r"tokenizer\.ggml\.pre is 'tekken'; allowed: smollm, gpt-2, llama-bpe",
        ),
        (
            {"metadata": {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}},
            r"tokenizer\.ggml\.tokens is missing",
        ),
    ],
)
def test_unsupported_files_are_named(tmp_path, options, message):
    with pytest.raises(CheckpointError, match=message):
        load_model(write_gguf(tmp_path / "tiny.gguf", tiny_model(), **options))


@pytest.mark.embedded
def test_embedded_weights_equal_gguf(embedded):
    file = GGUFFile(embedded_path("smollm2-135m"))
    views, config = parameter_views(embedded.model), embedded.model.config
    q, up = file.tensor("blk.7.attn_q.weight"), file.tensor("blk.29.ffn_up.weight")
    assert np.array_equal(up, views["model.layers.29.mlp.up_proj.weight"].numpy())
    assert np.array_equal(q, llama_cpp_permute(views["model.layers.7.self_attn.q_proj.weight"].numpy(), config.num_heads))
    # One Q4_1 block by hand: 32 weights of scale, minimum (float16) and 16 bytes of two 4-bit numbers, low halves first.
    raw = embedded_path("smollm2-135m").read_bytes()[file.tensors["blk.29.ffn_up.weight"].start :][:20]
    scale, minimum = np.frombuffer(raw[:4], np.float16).astype(np.float32)
    nibbles = np.frombuffer(raw[4:], np.uint8)
    assert np.array_equal(up[0, :32], scale * np.concatenate([nibbles & 15, nibbles >> 4]) + minimum)


@pytest.mark.embedded
def test_embedded_model_loads_in_seconds(embedded):
    assert embedded.name == "smollm2-135m"
    assert embedded.model.config.eos_token_ids == (2,)
    assert embedded.load_s < 30  # about 2.5 s on two idle cores
