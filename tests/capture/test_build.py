"""What options stand for where they leave the choice to the machine."""

import pytest
import torch

from stepgraph.capture.build import EngineOptions, build_engine
from stepgraph.model.checkpoint import load_model


@pytest.mark.parametrize(
    ("device", "weights", "cpu_has_it", "gpu_has_it", "expected"),
    [
        ("cpu", None, True, False, "bfloat16"),
        ("cpu", None, False, True, "float32"),
        (None, None, False, True, "bfloat16"),
        ("cuda:0", None, True, False, "float32"),
        (None, "int8", False, True, "float32"),
    ],
)
def test_dtype_auto_is_what_the_device_that_runs_has(device, weights, cpu_has_it, gpu_has_it, expected, monkeypatch):
    """int8 weights run on the CPU, whatever else there is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: gpu_has_it)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: cpu_has_it)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert EngineOptions(dtype="auto", device=device, weights=weights).dtype == expected


def test_default_k_follows_the_batch_on_a_cpu():
    """Rows of many requests cost: 3 drafts for one or two, 1 for more; on CUDA, where nothing was measured, 3 for all."""
    for batch, k in ((1, 3), (2, 3), (3, 1), (8, 1), (4096, 1)):
        assert EngineOptions("random:tiny-llama", "ngram", device="cpu").make_policy().choose(batch) == k
    assert EngineOptions("random:tiny-llama", "none", device="cpu").make_policy().ks == {0}
    assert EngineOptions("random:tiny-llama", "ngram", k=5, device="cpu").make_policy().ks == {5}
    assert EngineOptions("random:tiny-llama", "ngram", schedule=[[1, 8, 2]], device="cpu").make_policy().ks == {2}


def test_draft_weights_that_are_there_already_are_used():
    target, draft = load_model("random:tiny-llama"), load_model("random:tiny-llama").model
    options = EngineOptions("random:tiny-llama", "draft-model:nowhere", k=2, max_len=64)
    assert build_engine(options, target, draft).engine.graphs.step.drafter.model is draft
