"""What options stand for where they leave the choice to the machine."""

import pytest
import torch

from stepgraph.capture.build import EngineOptions


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
