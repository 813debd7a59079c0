"""Greedy text of the embedded model by us and by others: same weights, prompts and token counts, in turns in one process.

Every provider answers a prompt before any answers the next, in another order each time, so that what else the machine does
falls on all of them alike. A speed-up is the median over prompts of a provider's rate over that of transformers' plain decoding
in float32 for the same prompt. Rates take in the prompt's prefill, whoever computes it.
"""

import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

import torch

from stepgraph.capture.experiments.peer_providers import MODEL, OURS, Q4_1, THEIRS, Generate, providers
from stepgraph.capture.experiments.prompt_sets import load_prompts, spread
from stepgraph.capture.experiments.results import Table
from stepgraph.capture.prompts import encode_prompt
from stepgraph.model.checkpoint import load_model

BASELINE = (THEIRS, "float32", 0)
WEIGHTS = ("float32", "bfloat16", "int8", Q4_1)
LARGE_BATCH = 16


@dataclass
class Run:
    """What one provider did: seconds and tokens of each group of prompts."""

    generate: Generate
    seconds: list[float] = field(default_factory=list)
    tokens: list[list[list[int]]] = field(default_factory=list)

    def rates(self) -> list[float]:
        return [sum(map(len, tokens)) / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    def texts(self) -> list[list[int]]:
        return [text for group in self.tokens for text in group]


def _plain(name: str, weights: str) -> tuple[str, str, int]:
    """Whose text a provider's is held against: its own plain decoding, and transformers' where it is that."""
    if name.startswith(OURS):
        return (OURS, weights, 0) if name != OURS else (THEIRS, "bfloat16" if weights == "int8" else weights, 0)
    return (THEIRS, weights, 0) if name.startswith(THEIRS) else BASELINE


def peer_rows(groups: Sequence[list[list[int]]], new_tokens: int, weights: Sequence[str]) -> Iterator[dict]:
    """A row for each provider.

    Args:
        groups: token ids of prompts that are answered at once, all groups of one size.
        new_tokens: of each answer, whatever the model says of its end.
        weights: of `WEIGHTS`; the first has to be "float32".
    """
    batch = len(groups[0])
    max_len = max(len(ids) for group in groups for ids in group) + new_tokens + 1
    runs: dict[tuple[str, str, int], Run] = {}
    absent: dict[tuple[str, str, int], str] = {}
    for kind in weights:
        for name, k, generate in providers(kind, batch, max_len):
            if isinstance(generate, str):
                absent[name, kind, k] = generate
            else:
                generate(groups[0], 4)  # lazy set-up is not what is compared
                runs[name, kind, k] = Run(generate)
    for number, group in enumerate(groups):
        keys = list(runs)
        shift = number % len(keys)
        for key in keys[shift:] + keys[:shift]:
            start_s = time.perf_counter()
            tokens = runs[key].generate(group, new_tokens)
            runs[key].seconds.append(time.perf_counter() - start_s)
            runs[key].tokens.append(tokens)
    shared = {"prompts": batch * len(groups), "batch": batch, "new_tokens": new_tokens, "threads": torch.get_num_threads()}
    shared |= {"process_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    baseline = runs.get(BASELINE)
    for (name, kind, k), run in runs.items():
        row = {"provider": name, "status": "ok", "dtype": kind, "k": k, **shared, **_spread("tokens_per_s", run.rates())}
        if baseline is not None:
            ratios = [rate / theirs for rate, theirs in zip(run.rates(), baseline.rates(), strict=True)]
            row |= _spread("speedup", ratios)
        plain = runs.get(_plain(name, kind))
        if plain is not None:
            row["same_text"] = sum(mine == other for mine, other in zip(run.texts(), plain.texts(), strict=True))
        yield row
    for (name, kind, k), why in absent.items():
        yield {"provider": name, "status": f"absent: {why}", "dtype": kind, "k": k, "batch": batch}


def _spread(name: str, values: list[float]) -> dict:
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {f"{name}_p50": round(median(values), 3), f"{name}_p25": round(low, 3), f"{name}_p75": round(high, 3)}


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """All own prompts one by one, then 16 at once; `quick` is two prompts in float32. Greedy text has no seed."""
    tokenizer = load_model(MODEL).tokenizer
    ids = [encode_prompt(record.prompt, tokenizer) for record in spread(load_prompts("own"), 2 if quick else 24)]
    yield from peer_rows([[each] for each in ids], 8 if quick else 32, WEIGHTS[:1] if quick else WEIGHTS)
    if not quick:
        groups = [ids[:LARGE_BATCH], ids[-LARGE_BATCH:], ids[: LARGE_BATCH // 2] + ids[-LARGE_BATCH // 2 :]]
        yield from peer_rows(groups, 32, WEIGHTS[:3])


def table(rows: list[dict]) -> Table:
    lines = [
        [
            str(row["batch"]), row["dtype"], row["provider"], str(row["k"]), f"{row['tokens_per_s_p50']:.1f}",
            f"{row['speedup_p50']:.2f} ({row['speedup_p25']:.2f} to {row['speedup_p75']:.2f})" if "speedup_p50" in row else "",
            f"{row['same_text']} of {row['prompts']}" if "same_text" in row else "",
        ]
        for row in rows
        if row["status"] == "ok"
    ]  # fmt: skip
    missing = dict.fromkeys(f"{row['provider']} is {row['status']}." for row in rows if row["status"] != "ok")
    note = (
        "Speed-up over transformers' plain decoding in float32 at the same batch, by prompt: median and quartiles. Same text: "
        "answers equal to the provider's own plain decoding with the same weights; ours without drafts, to transformers'."
    )
    return Table(["batch", "weights", "provider", "k", "tokens/s", "speed-up", "same text"], lines, " ".join([note, *missing]))


def headlines(rows: list[dict]) -> list[tuple[str, str]]:
    """Speed-up of every provider over transformers' plain decoding in float32."""
    told = []
    for row in rows:
        if row["status"] == "ok" and "speedup_p50" in row and (row["provider"], row["dtype"], row["k"]) != BASELINE:
            how = f"batch {row['batch']}: {row['provider']}, {row['dtype']}" + (f", k = {row['k']}" if row["k"] else "")
            told.append((f"greedy tokens/s over transformers in float32, {how}", f"{row['speedup_p50']:.2f}"))
    return told
