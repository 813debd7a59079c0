"""Hidden states of a corpus, kept from the first epoch on: on a CPU the target's forward pass is most of a training step."""

from pathlib import Path

import torch
from torch import Tensor

from stepgraph.model.drafters.training.corpus import Batch, Corpus


class HiddenStore:
    """Rows of numbers for every token of a corpus, in bfloat16, in a file that is mapped into memory.

    Args:
        path: the file, `tokens * width * 2` bytes; beside it `.known` has a byte for each text. Files of another size are of
            another corpus and are started anew.
        corpus: whose tokens, in order of texts.
        width: numbers for a token.
    """

    def __init__(self, path: Path, corpus: Corpus, width: int):
        lengths = torch.tensor([len(text.tokens) for text in corpus.texts])
        self.starts, self.width = (lengths.cumsum(0) - lengths).tolist(), width
        total = int(lengths.sum()) * width
        known = path.with_suffix(".known")
        sizes = [file.stat().st_size if file.exists() else -1 for file in (path, known)]
        if sizes != [2 * total, len(corpus.texts)]:
            for file in (path, known):
                file.unlink(missing_ok=True)
        self.values = torch.from_file(str(path), shared=True, size=total, dtype=torch.bfloat16).view(-1, width)
        self.known = torch.from_file(str(known), shared=True, size=len(corpus.texts), dtype=torch.uint8)

    def get(self, batch: Batch) -> Tensor | None:
        """`[B, T, width]`, zero where there is no token, or None when a text of the batch is not there yet."""
        if not self.known[batch.index].all():
            return None
        out = torch.zeros(*batch.tokens.shape, self.width, dtype=torch.bfloat16)
        for row, (index, length) in enumerate(zip(batch.index, batch.lengths.tolist(), strict=True)):
            out[row, :length] = self.values[self.starts[index] : self.starts[index] + length]
        return out

    def put(self, batch: Batch, values: Tensor) -> None:
        """Keep `values [B, T, width]` (bfloat16) of a batch."""
        values = values.cpu()
        for row, (index, length) in enumerate(zip(batch.index, batch.lengths.tolist(), strict=True)):
            self.values[self.starts[index] : self.starts[index] + length] = values[row, :length]
        self.known[batch.index] = 1
