"""Text that the target writes itself: many rows at once, a finished row giving way to the next prompt."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.rows import query_rows
from stepgraph.model.transformer import Transformer

T = TypeVar("T")
PREFILL_TOKENS = 2048  # padding counted; more at once only spills out of the caches
SAMPLED_AT_ONCE = 16  # rows whose laws exist at the same time, for the same reason
BLOCK_SIZE = 64


class Text(NamedTuple):
    """A prompt and what the target wrote after it; `tokens[:prompt_len]` is the prompt."""

    tokens: list[int]
    prompt_len: int


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """`[N]` tokens from `logits [N, V]`: arg-max where `temperature [N]` is 0, else by inversion of `uniform [N, 1]`.

    Inversion (softmax, cumulative sum, binary search) costs a tenth of `torch.multinomial` over a large vocabulary on a CPU.
    The draws of training data need not be those of the product.
    """
    tokens = logits.argmax(-1)
    for rows in (temperature > 0).nonzero()[:, 0].split(SAMPLED_AT_ONCE):
        law = (logits[rows].float() / temperature[rows, None]).softmax(-1).cumsum(-1)
        drawn = torch.searchsorted(law, uniform[rows] * law[:, -1:], right=True)[:, 0]
        tokens[rows] = drawn.clamp(max=logits.shape[-1] - 1)
    return tokens


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

    Raises:
        ValueError: a prompt is empty, or has no place in `max_len`.
    """
    waiting, ends, device = iter(prompts), set(eos), target.device
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    # Each row keeps its own blocks; block 0 is nobody's.
    blocks = -(-max_len // BLOCK_SIZE)
    table = torch.arange(1, 1 + rows * blocks, device=device).view(rows, blocks)
    kv = PagedKV(target.config, num_blocks=1 + rows * blocks, block_size=BLOCK_SIZE, dtype=target.dtype, device=device)
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
                if not 0 < len(prompt) < max_len:
                    raise ValueError(f"a prompt has {len(prompt)} tokens; allowed are 1 to {max_len - 1}")
                texts[row] = Text(list(prompt), len(prompt))
                lengths[row], last[row], temperature[row] = len(prompt) - 1, prompt[-1], rng.choice(temperatures)
                fresh.append(row)
            _prefill(target, kv, [(table[row], texts[row].tokens[:-1]) for row in fresh])
        busy = [row for row in range(rows) if texts[row] is not None]
        if not busy:
            return
        if exhausted and 2 * len(busy) <= rows:  # the tail: no more prompts, so idle rows would only cost time
            lengths, last, temperature, table = (values[busy] for values in (lengths, last, temperature, table))
            texts, rows = [texts[row] for row in busy], len(busy)
        at, live = lengths.to(device), torch.tensor([text is not None for text in texts], device=device)
        query = query_rows(at, 1, table, BLOCK_SIZE, live, at + 1)
        hidden = target.hidden(last[:, None].to(device), query, kv)
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


def _prefill(target: Transformer, kv: PagedKV, prompts: list[tuple[Tensor, list[int]]]) -> None:
    """Run prompts, as (their blocks, tokens), through the target, those of like length together: short ones are padded."""
    some = sorted((prompt for prompt in prompts if prompt[1]), key=lambda prompt: len(prompt[1]))
    lengths = [len(tokens) for _, tokens in some]
    for group in padded_groups(some, lengths, PREFILL_TOKENS):
        blocks, texts = zip(*group, strict=True)
        known = torch.tensor([len(tokens) for tokens in texts], device=target.device)
        longest = int(known.max())
        padded = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in texts], device=target.device)
        first, live = torch.zeros_like(known), torch.ones_like(known, dtype=torch.bool)
        target.hidden(padded, query_rows(first, longest, torch.stack(blocks), BLOCK_SIZE, live, known), kv)
