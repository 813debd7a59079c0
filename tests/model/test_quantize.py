"""int8 weights of models: what is replaced, what is not, and how close the outputs stay."""

import pytest
import torch

from stepgraph.model.checkpoint import load_model
from stepgraph.model.quantize import is_int8, quantize_int8
from stepgraph.model.transformer import multiplied

MODELS = ["random:tiny-llama", "random:tiny-qwen2", "random:tiny-qwen3"]


@pytest.mark.parametrize("name", MODELS)
def test_matrices_become_int8_and_nothing_else(name):
    model, plain = load_model(name).model, load_model(name).model
    assert not is_int8(model)
    quantize_int8(model)
    assert is_int8(model)
    assert {weight.dtype for weight in multiplied(model)} == {torch.int8}
    assert torch.equal(model.embed, plain.embed)
    assert model.dtype == torch.float32
    buffers = dict(model.named_buffers())
    for layer in model.layers:
        assert all(torch.is_tensor(getattr(layer, f"{name}_scale")) for name in ("qkv", "o", "gate_up", "down"))
    assert all(f"layers.0.{name}_scale" in buffers for name in ("qkv", "o", "gate_up", "down"))
    assert "lm_head_scale" in buffers


def test_logits_stay_close():
    model, plain = load_model("random:tiny-llama").model, load_model("random:tiny-llama").model
    quantize_int8(model)
    hidden = torch.randn(4, plain.config.hidden_size, generator=torch.Generator().manual_seed(0))
    exact = plain.logits(hidden)
    error = (model.logits(hidden) - exact).norm() / exact.norm()
    assert 0 < error < 0.02


def test_a_second_time_changes_nothing():
    model = load_model("random:tiny-llama").model
    quantize_int8(model)
    hidden = torch.randn(4, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    once = model.logits(hidden)
    quantize_int8(model)
    assert torch.equal(model.logits(hidden), once)
