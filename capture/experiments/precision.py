"""What fewer bits cost: perplexity of the embedded model on the prompts, by dtype and weights, each beside float32."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from stepgraph.capture.build import EngineOptions, load_target
from stepgraph.capture.experiments.prompt_sets import load_prompts, spread
from stepgraph.capture.experiments.results import Table
from stepgraph.model.checkpoint import LoadedModel
from stepgraph.model.kv_cache import PagedKV
from stepgraph.model.rows import query_rows

MODEL, BLOCK_SIZE = "smollm2-135m", 16
# (dtype, weights); the first is what the others are held against.
WAYS = (("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int8"))


@torch.no_grad()
def text_logits(loaded: LoadedModel, ids: list[int]) -> Tensor:
    """`[T, V]` float32 logits after each token of a text, from one pass."""
    model, blocks = loaded.model, -(-len(ids) // BLOCK_SIZE)
    kv = PagedKV(model.config, num_blocks=blocks + 1, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device)
    table = torch.arange(1, blocks + 1, device=model.device)[None]
    start, end = torch.zeros(1, dtype=torch.int64, device=model.device), torch.tensor([len(ids)], device=model.device)
    rows = query_rows(start, len(ids), table, BLOCK_SIZE, end > 0, end)
    return model.logits(model.hidden(torch.tensor([ids], device=model.device), rows, kv))[0].float()


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """A row for each way; `quick` takes two prompts. Nothing is drawn, so there is no seed.

    `loss_over` is the mean over tokens of the loss less that of float32, in nats, and `loss_over_se` its standard error;
    `same_argmax` is the share of places where both find the same token likeliest.
    """
    expected: list[tuple[Tensor, Tensor]] = []
    for dtype, weights in WAYS:
        loaded = load_target(EngineOptions(MODEL, "none", k=0, dtype=dtype, weights=weights, device="cpu"))
        found = []
        for record in spread(load_prompts("own"), 2 if quick else 24):
            ids = loaded.tokenizer.encode(record.prompt)
            logits = text_logits(loaded, ids)
            losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
            found.append((losses, logits.argmax(-1)))
        expected = expected or found
        losses, argmax = (torch.cat(parts) for parts in zip(*found, strict=True))
        base_losses, base_argmax = (torch.cat(parts) for parts in zip(*expected, strict=True))
        over = losses - base_losses
        yield {
            "dtype": dtype, "weights": weights or dtype, "tokens": len(losses),
            "perplexity": round(math.exp(losses.double().mean()), 4), "loss_over": round(float(over.mean()), 5),
            "loss_over_se": round(float(over.std() / len(over) ** 0.5), 5),
            "same_argmax": round(float((argmax == base_argmax).double().mean()), 4),
        }  # fmt: skip


def table(rows: list[dict]) -> Table:
    lines = [
        [
            row["dtype"], row["weights"], f"{row['perplexity']:.3f}", f"{row['loss_over']:+.4f} ± {row['loss_over_se']:.4f}",
            f"{row['same_argmax']:.3f}",
        ]
        for row in rows
    ]  # fmt: skip
    note = (
        f"Over {rows[0]['tokens']} tokens of the prompts. Loss in nats a token, less that of float32, with its standard error."
    )
    return Table(["dtype", "weights", "perplexity", "loss over float32", "same arg-max"], lines, note)


def headlines(rows: list[dict]) -> list[tuple[str, str]]:
    """Perplexity of each way."""
    return [
        (f"perplexity on the prompts, {row['dtype']}, weights {row['weights']}", f"{row['perplexity']:.2f}") for row in rows
    ]
