"""Whole captured speculative steps with every op that has a Triton kernel on it: the references' tokens, cache and counters."""

import pytest
import torch
from worlds import place, tiny_model, tiny_step

from stepgraph.capture.graphs import StepGraphs
from stepgraph.capture.keys import GraphKey, KeySet
from stepgraph.kernels.registry import IMPLEMENTATIONS, use_triton_on_cpu

PROMPT = [3, 1, 4, 1, 5, 9, 3, 1, 4]
WITHOUT_KERNEL: set[str] = set()


def run(drafter: str, ks: list[int], temperature: float) -> dict[str, torch.Tensor]:
    model = tiny_model(dtype=torch.float32, family="qwen3", invariant=True)
    step = tiny_step(drafter, model=model, num_slots=2, max_len=48, k_max=3)
    place(step, 0, PROMPT)
    place(step, 1, [7, 7, 7, 2], temperature=temperature, seed=5)
    state = step.state
    state.transformed[0], state.repetition[0], state.frequency[0], state.prompt_len[0] = True, 1.2, 0.5, len(PROMPT)
    state.wants_logprobs[1], state.verify[1] = True, 1
    graphs = StepGraphs(step, KeySet(GraphKey(2, k) for k in sorted(set(ks))))
    for k in ks:
        step.state.set_rows([1, 0])
        graphs.replay(2, k)
    return dict(step.named_buffers())


def missing_kernels() -> set[str]:
    return {name for name, known in IMPLEMENTATIONS.items() if "triton" not in known}


def test_ops_without_a_kernel_are_known():
    assert missing_kernels() <= WITHOUT_KERNEL


@pytest.mark.parametrize(
    ("drafter", "ks", "temperature"),
    [
        ("ngram", [3, 2, 0], 0.0),
        ("early-exit:1", [2, 2], 0.0),
        ("early-exit:1", [2, 1], 0.9),
        ("eagle3:tiny", [2, 0, 1], 0.9),
    ],
)
def test_captured_steps_on_kernels(drafter, ks, temperature):
    expected = run(drafter, ks, temperature)
    with use_triton_on_cpu(except_for=missing_kernels()):
        actual = run(drafter, ks, temperature)
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")
        else:
            assert torch.equal(actual[name], value), name
    assert (expected["state.seq_len"][:2] > torch.tensor([len(PROMPT), 4])).all()
