"""The JSON card of a trained head: what it was made from, how, where, and how good it is on texts it never saw."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from stepgraph.model.drafters.training.corpus import Corpus
from stepgraph.model.drafters.training.trainer import Trainer

CARD = "card.json"


def hardware(device: torch.device) -> dict[str, Any]:
    """Processor, threads and versions."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    found: dict[str, Any] = {"cpu": model, "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found | {"torch": torch.__version__}


def card(target_name: str, corpus: Corpus, trainer: Trainer, command: str, stored_bytes: int) -> dict[str, Any]:
    """Everything about a head, as plain JSON values.

    `held_out` is over every 24th text: `accuracy[s]` is how often the head's likeliest token is the target's, in the draft
    vocabulary, when its s earlier drafts were right.
    """
    head, options = trainer.head, trainer.options
    held_out, vocab = trainer.measure(corpus.held_out()), head.config.vocab_size
    return {
        "target": target_name,
        "command": command,
        "head": {
            "parameters": sum(weight.numel() for weight in head.parameters()),
            "bytes": stored_bytes,
            "draft_vocab_size": head.eagle.draft_vocab_size,
            "coverage": round(corpus.coverage(head.target_ids.cpu(), vocab), 4),
            "feature_layers": list(head.eagle.feature_layers),
            "frozen_output_rows": options.frozen_head,
        },
        "data": {
            "texts": len(corpus.texts),
            "tokens": corpus.tokens,
            "prompt_tokens": sum(text.prompt_len for text in corpus.texts),
            "minutes": round(corpus.seconds / 60, 2),
            "tokens_per_s": round(corpus.tokens / max(corpus.seconds, 1e-9), 1),
        },
        "training": {
            "tokens": trainer.tokens,
            "steps": trainer.steps,
            "minutes": round(trainer.elapsed_s / 60, 2),
            "tokens_per_s": round(trainer.tokens / max(trainer.elapsed_s, 1e-9), 1),
            "passes": options.passes,
            "lr": options.lr,
            "batch_tokens": options.batch_tokens,
            "seed": options.seed,
        },
        "held_out": {
            "rows": held_out.rows,
            "loss": [round(value, 4) for value in held_out.loss],
            "accuracy": [round(value, 4) for value in held_out.accuracy],
        },
        "hardware": hardware(head.device) | {"dtype_of_target": str(trainer.target.dtype).removeprefix("torch.")},
    }
