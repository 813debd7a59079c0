"""What the captures of a schedule take: seconds and bytes of each key, and the pool that all share."""

import dataclasses
from collections.abc import Iterator

import torch

from stepgraph.capture.build import build_engine
from stepgraph.capture.experiments.modes import random_options


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """A row for each key of each model, and one for all keys together."""
    schedule = [[1, 8, 3], [9, 16, 1]] if quick else [[1, 16, 5], [17, 32, 4], [33, 64, 3], [65, 128, 1], [129, 256, 0]]
    models = ("tiny-llama",) if quick else ("smollm2-135m", "qwen3-0.6b", "llama-3.2-1b", "llama-3.1-8b")
    for model in models:
        options = random_options(model, "eagle3:random", 5, schedule[-1][1], 64 if quick else 1024)
        before = _reserved()
        engine = build_engine(dataclasses.replace(options, k=None, schedule=schedule)).engine
        built = _reserved()
        engine.graphs.capture()
        after = _reserved()
        for row in engine.graphs.rows():
            yield {"model": model, "what": "key", **row}
        report = engine.graphs.report()
        yield {
            "model": model, "what": "all keys", "graphs": report["captures"], "capture_s": report["capture_s"],
            "reserved_by_engine_bytes": built - before, "reserved_by_graphs_bytes": after - built,
        }  # fmt: skip
        engine.graphs.destroy()
        del engine


def _reserved() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
