"""The embedded model understands text, and as well as transformers does with the same weights."""

import pytest
import torch
from oracles import our_logits, to_transformers, transformers_logits

PARAGRAPH = (
    "The water cycle describes how water moves through the environment. The sun heats the surface of oceans, lakes and rivers, "
    "and some of the water evaporates into the air. As the vapor rises it cools and condenses into tiny droplets, which form "
    "clouds. When the droplets grow heavy enough, they fall back to the ground as rain or snow. Some of that water soaks into "
    "the soil, where plants take it up through their roots, and the rest flows over the land into streams and rivers, until it "
    "reaches the sea and the cycle begins again."
)


def perplexity(logits: torch.Tensor, tokens: torch.Tensor) -> float:
    return torch.nn.functional.cross_entropy(logits[:-1].double(), tokens[1:]).exp().item()


@pytest.mark.embedded
def test_perplexity_equals_transformers(embedded):
    tokens = torch.tensor(embedded.tokenizer.encode(PARAGRAPH))
    expected = transformers_logits(to_transformers(embedded.model), tokens)
    found = our_logits(embedded.model, tokens)
    assert perplexity(found, tokens) == pytest.approx(perplexity(expected, tokens), rel=1e-4)
    assert perplexity(found, tokens) < 10  # a wrong permutation, rotation or norm gives hundreds
    in_steps = our_logits(embedded.model, tokens[:24], query_len=4)
    assert (in_steps - expected[:24]).abs().max() < 1e-3  # the largest logit is near 36
