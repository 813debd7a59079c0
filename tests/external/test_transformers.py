"""Against transformers: its speculative sampling given the same uniform numbers, and its assisted generation."""

import inspect

import pytest
import torch

from stepgraph.kernels.rejection import reference as reference_module
from stepgraph.kernels.rejection import rejection_sample_reference
from stepgraph.kernels.sampling import token_law_reference

generation = pytest.importorskip("transformers.generation.utils")


@pytest.mark.parametrize("k", [1, 3, 5])
def test_accepted_drafts_are_those_of_speculative_sampling(monkeypatch, k):
    speculative = getattr(generation, "_speculative_sampling", None)
    if speculative is None:
        pytest.skip("this transformers has no _speculative_sampling")
    monkeypatch.setattr(reference_module, "token_law", token_law_reference)
    rows, vocab, g = 200, 7, torch.Generator().manual_seed(k)
    target = torch.randn(rows, k + 1, vocab, generator=g)
    draft = target[:, :k] + torch.randn(rows, k, vocab, generator=g)
    law = draft.softmax(-1)
    tokens = torch.multinomial(law.view(-1, vocab), 1, generator=g).view(rows, k)
    u = torch.rand(rows, k, generator=g)
    monkeypatch.setattr(reference_module, "uniform", lambda *_: u)
    ones, zeros = torch.ones(rows), torch.zeros(rows, dtype=torch.int64)
    emitted, accepted, _ = rejection_sample_reference(
        target, tokens, law, ones, zeros, ones, torch.zeros(rows), torch.arange(rows), zeros
    )
    prompt = torch.tensor([[1, 2]])
    # Older versions take a fifth argument, whether the candidate is finished.
    finished = (False,) if "is_done_candidate" in inspect.signature(speculative).parameters else ()
    for row in range(rows):
        one = slice(row, row + 1)
        monkeypatch.setattr(torch, "rand_like", lambda t, row=row: u[row][None].to(t.dtype))
        valid, matches = speculative(torch.cat([prompt, tokens[one]], 1), draft[one], k, target[one], *finished)
        assert int(matches) == accepted[row]
        assert valid[0, :-1].tolist() == emitted[row, : accepted[row]].tolist()


def test_assisted_generation_gives_the_same_greedy_text(tiny_checkpoint):
    """Their drafts and ours, their verification and ours: one greedy text."""
    transformers = pytest.importorskip("transformers")
    from stepgraph.capture.build import EngineOptions, build_engine
    from stepgraph.capture.request import SamplingParams

    directory = tiny_checkpoint("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assistant = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.02 * torch.randn(assistant.lm_head.weight.shape))
    assistant.generation_config.assistant_confidence_threshold = 0
    assistant.generation_config.num_assistant_tokens = 3
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    out = model.generate(
        torch.tensor([prompt]), assistant_model=assistant, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    options = EngineOptions(model=str(directory), drafter="early-exit:1", k=3, max_batch=1, max_len=64, device="cpu")
    ours = build_engine(options).engine.generate([prompt], SamplingParams(max_new_tokens=16, ignore_eos=True))[0]
    assert ours.token_ids == out[0, len(prompt) :].tolist()
