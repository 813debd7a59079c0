"""Texts on disk, in numbered shards that are written whole or not at all, and the batches that training takes from them."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from stepgraph.model.drafters.training.generate import Text, padded_groups

HELD_OUT = 24  # every 24th text is never trained on, and measures accuracy


class Batch(NamedTuple):
    """Texts side by side: `tokens [B, T]` int64, padded with 0; `lengths, prompt_lens [B]`; `index` of each in the corpus."""

    tokens: Tensor
    lengths: Tensor
    prompt_lens: Tensor
    index: list[int]


class Corpus:
    """Texts of a folder of shards `shard-00000.safetensors`, …, in order of writing.

    Attributes:
        folder: where the shards are.
        texts: all of them.
        shards: how many files there are.
        seconds: what writing them took.
        prompts: how many prompts were given out for them.
    """

    def __init__(self, folder: Path):
        self.folder, self.texts, self.shards, self.seconds, self.prompts = folder, [], 0, 0.0, 0
        while (path := self._path(self.shards)).exists():
            with safe_open(path, framework="pt") as file:
                about = file.metadata()
                tokens, lengths, prompt_lens = (file.get_tensor(name) for name in ("tokens", "lengths", "prompt_lens"))
            parts = tokens.tolist(), lengths.tolist(), prompt_lens.tolist()
            self._take(self._split(*parts), float(about["seconds"]), int(about["prompts"]))

    @property
    def tokens(self) -> int:
        """Tokens that the target wrote, prompts not counted."""
        return sum(len(text.tokens) - text.prompt_len for text in self.texts)

    def add(self, texts: list[Text], seconds: float, prompts: int) -> None:
        """Write one more shard."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            "tokens": torch.tensor([token for text in texts for token in text.tokens], dtype=torch.int32),
            "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=torch.int32),
            "prompt_lens": torch.tensor([text.prompt_len for text in texts], dtype=torch.int32),
        }
        path = self._path(self.shards)
        partial = path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"seconds": repr(seconds), "prompts": str(prompts)})
        os.replace(partial, path)
        self._take(texts, seconds, prompts)

    def draft_vocabulary(self, size: int, vocab_size: int, keep: Tensor | None = None) -> Tensor:
        """`[size]` int64 ids in order: those in `keep`, and those the target wrote most often (ties and rest: lowest ids
        first).
        """
        written = [token for text in self.texts for token in text.tokens[text.prompt_len :]]
        counts = torch.bincount(torch.tensor(written, dtype=torch.int64), minlength=vocab_size)
        if keep is not None:
            counts[keep] = counts.max() + 1
        return counts.argsort(descending=True, stable=True)[:size].sort().values

    def coverage(self, ids: Tensor, vocab_size: int) -> float:
        """Share of what the target wrote that is in a draft vocabulary."""
        inside = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        written = torch.tensor([token for text in self.texts for token in text.tokens[text.prompt_len :]])
        return float(inside[written].float().mean())

    def held_out(self) -> list[int]:
        return list(range(0, len(self.texts), HELD_OUT))

    def batches(self, chosen: list[int], tokens: int, rng: random.Random | None) -> Iterator[Batch]:
        """Batches of up to `tokens` tokens, padding counted, of texts of like length, in an order drawn from `rng`."""
        order = sorted(chosen, key=lambda i: (len(self.texts[i].tokens), rng.random() if rng else 0))
        groups = padded_groups(order, [len(self.texts[i].tokens) for i in order], tokens)
        if rng:
            rng.shuffle(groups)
        yield from (self.batch(group) for group in groups)

    def batch(self, index: list[int]) -> Batch:
        texts = [self.texts[i] for i in index]
        longest = max(len(text.tokens) for text in texts)
        tokens = torch.tensor([text.tokens + [0] * (longest - len(text.tokens)) for text in texts])
        lengths = torch.tensor([len(text.tokens) for text in texts])
        return Batch(tokens, lengths, torch.tensor([text.prompt_len for text in texts]), index)

    def _path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.safetensors"

    def _take(self, texts: list[Text], seconds: float, prompts: int) -> None:
        self.texts += texts
        self.shards += 1
        self.seconds += seconds
        self.prompts += prompts

    @staticmethod
    def _split(tokens: list[int], lengths: list[int], prompt_lens: list[int]) -> list[Text]:
        texts, start = [], 0
        for length, prompt_len in zip(lengths, prompt_lens, strict=True):
            texts.append(Text(tokens[start : start + length], prompt_len))
            start += length
        return texts
