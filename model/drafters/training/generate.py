"""Text that the target writes itself: many rows at once, a finished row giving way to the next prompt."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from stepgraph.model.drafters.training.dense import DenseCache, target_forward
from stepgraph.model.transformer import Transformer

T = TypeVar("T")
PREFILL_TOKENS = 2048  # padding counted; more at once only spills out of the caches


class Text(NamedTuple):
    """A prompt and what the target wrote after it; `tokens[:prompt_len]` is the prompt."""

    tokens: list[int]
    prompt_len: int


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """`[N]` tokens from `logits [N, V]`: arg-max where `temperature [N]` is 0, else by inversion of `uniform [N, 1]`.

    Inversion (softmax, cumulative sum, binary search) costs a tenth of `torch.multinomial` over a large vocabulary on a CPU.
    The draws of training data need not be those of the product.
    """
    logits = logits.float()
    greedy = temperature <= 0
    law = (logits / torch.where(greedy, 1.0, temperature)[:, None]).softmax(-1).cumsum(-1)
    drawn = torch.searchsorted(law, uniform * law[:, -1:], right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return torch.where(greedy, logits.argmax(-1), drawn)


def padded_groups(items: Sequence[T], lengths: Sequence[int], most: int) -> list[list[T]]:
    """Neighbours together, up to `most` tokens a group when padded to the longest of it; `lengths` ascend."""
    groups: list[list[T]] = []
    for item, length in zip(items, lengths, strict=True):
        if not groups or (len(groups[-1]) + 1) * length > most:
            groups.append([])
        groups[-1].append(item)
    return groups


@torch.no_grad()
def write_texts(
    target: Transformer,
    prompts: Iterable[list[int]],
    *,
    rows: int,
    max_len: int,
    eos: Iterable[int],
    seed: int,
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0),
    out_of_time: Callable[[], bool] = lambda: False,
) -> Iterator[Text]:
    """Texts in the order in which they end: at an end-of-sequence token, or at `max_len` tokens.

    Args:
        target: the model.
        prompts: token ids, each shorter than `max_len`.
        rows: texts written at the same time.
        max_len: most tokens, prompt included.
        eos: ids that end a text (and belong to it).
        seed: of the draws; each prompt has one of `temperatures`.
        out_of_time: asked between steps; once true, texts under way end where they are.
    """
    waiting, ends, device = iter(prompts), set(eos), target.device
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    cache = DenseCache(target, rows, max_len)
    texts: list[Text | None] = [None] * rows
    lengths, last = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    temperature = torch.zeros(rows)
    exhausted = False
    while True:
        if out_of_time():
            yield from (text for text in texts if text is not None and len(text.tokens) > text.prompt_len)
            return
        free = [row for row in range(rows) if texts[row] is None]
        # Several at once: a prefill of few rows costs nearly as much as one of many.
        if not exhausted and (len(free) == rows or len(free) > rows // 8):
            fresh = []
            for row in free:
                prompt = next(waiting, None)
                if prompt is None:
                    exhausted = True
                    break
                texts[row] = Text(list(prompt), len(prompt))
                lengths[row], last[row], temperature[row] = len(prompt) - 1, prompt[-1], rng.choice(temperatures)
                fresh.append(row)
            _prefill(target, cache, [(row, texts[row].tokens[:-1]) for row in fresh])
        busy = [row for row in range(rows) if texts[row] is not None]
        if not busy:
            return
        if exhausted and 2 * len(busy) <= rows:  # the tail: no more prompts, so idle rows would only cost time
            cache.storage = cache.storage[:, :, torch.tensor(busy, device=device)]
            lengths, last, temperature = (values[busy] for values in (lengths, last, temperature))
            texts, rows = [texts[row] for row in busy], len(busy)
        seen = int(lengths.max()) + 1
        at = lengths[:, None].to(device)
        hidden, _ = target_forward(target, last[:, None].to(device), at, cache=cache, seen=seen)
        uniform = torch.rand(rows, 1, generator=generator)
        last = sample(target.logits(hidden[:, 0]), temperature.to(device), uniform.to(device)).cpu()
        for row, token in enumerate(last.tolist()):
            text = texts[row]
            if text is None:
                continue
            text.tokens.append(token)
            lengths[row] += 1
            if token in ends or len(text.tokens) >= max_len:
                texts[row], lengths[row] = None, 0
                yield text


def _prefill(target: Transformer, cache: DenseCache, prompts: list[tuple[int, list[int]]]) -> None:
    """Run prompts, as (row, tokens), through the target, those of like length together: short ones are padded, and what padding
    writes is written over.
    """
    some = sorted((prompt for prompt in prompts if prompt[1]), key=lambda prompt: len(prompt[1]))
    for group in padded_groups(some, [len(tokens) for _, tokens in some], PREFILL_TOKENS):
        _prefill_padded(target, cache, group)


def _prefill_padded(target: Transformer, cache: DenseCache, prompts: list[tuple[int, list[int]]]) -> None:
    longest = max(len(tokens) for _, tokens in prompts)
    padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for _, tokens in prompts], device=target.device)
    own = DenseCache(target, len(prompts), longest)
    positions = torch.arange(longest, device=target.device)[None].expand(len(prompts), -1)
    target_forward(target, padded, positions, cache=own, seen=longest)
    rows = torch.tensor([row for row, _ in prompts], device=target.device)
    cache.storage[:, :, rows, :, :longest] = own.storage
