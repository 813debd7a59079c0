"""Losslessness as a table: the law of what engines emit against the target's, and greedy text against plain decoding.

*Law*: a target of random weights over 5 tokens answers one prompt thousands of times, each time with another seed, through
captured steps; the first three tokens of the answers are counted against the target's joint law of three tokens, which plain
forward passes over whole texts give in float64 (`stepgraph.model.drafters.training.dense`: no cache, no paged op). The same
engine with synthetic acceptance is no lossless one, and has to be told apart: the control row of the table.

*Greedy*: the embedded model's text at every k is compared with k = 0, token for token.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from stepgraph.capture.build import DTYPES, EngineOptions, build_engine
from stepgraph.capture.experiments.prompt_sets import load_prompts
from stepgraph.capture.experiments.results import Table
from stepgraph.capture.prompts import encode_prompt
from stepgraph.capture.request import SamplingParams
from stepgraph.kernels.rejection.law import chi_square
from stepgraph.model.checkpoint import CheckpointError, LoadedModel, load_model
from stepgraph.model.drafters.training.dense import target_forward
from stepgraph.model.presets import preset
from stepgraph.model.transformer import Transformer

VOCAB, LENGTH, BATCH = 5, 3, 8
PROMPT = [1, 2, 3, 1, 2, 3, 1]
DRAFT_MODEL = "draft-model:smaller"
DRAFTERS = ("none", "ngram", "early-exit:2", DRAFT_MODEL, "eagle3:random", "hybrid:2:eagle3:random")
METHODS = ("standard", "block")
# Prompts are taken in one a step and answers are short, so that few requests decode at once and their number goes up and down.
CHANGING = [[1, 1, 3], [2, 2, 2], [3, 8, 3]]
LOSSY = (0.9, 0.9, 0.9)  # acceptance rates of the control
GREEDY_MODEL = "smollm2-135m"
GREEDY_DRAFTERS = ("ngram", "early-exit:26", "eagle3", "hybrid")


def law_model(seed: int, **changes) -> Transformer:
    """A model over `VOCAB` tokens whose laws are far from uniform and never certain, in float64."""
    config = dataclasses.replace(preset("tiny-llama"), vocab_size=VOCAB, tie_embeddings=False, **changes)
    model = Transformer(config, dtype=torch.float64).randomize(seed)
    with torch.no_grad():
        model.lm_head.mul_(0.7)
    return model.eval()


def law_target(seed: int) -> LoadedModel:
    return LoadedModel(law_model(seed), None, "law", 0.0)


@torch.no_grad()
def joint_law(target: Transformer, prompt: list[int], length: int) -> np.ndarray:
    """`[V] * length`: the target's joint law of the tokens after a prompt."""
    vocab = target.config.vocab_size
    texts = torch.cartesian_prod(*[torch.arange(vocab)] * length).view(-1, length)
    tokens = torch.cat([torch.tensor(prompt).expand(len(texts), -1), texts], 1)
    hidden, _ = target_forward(target, tokens)
    laws = target.logits(hidden[:, len(prompt) - 1 : -1]).softmax(-1)
    return laws.gather(-1, texts[..., None])[..., 0].prod(-1).view((vocab,) * length).double().numpy()


def law_row(loaded: LoadedModel, drafter: str, verify: str, samples: int, seed: int, rates: tuple | None = None) -> dict:
    """Counts of the first `LENGTH` tokens of `samples` answers against the joint law.

    Returns:
        the row; `p_value` is the probability of a statistic at least as large under the law.
    """
    schedule = [[1, BATCH, 0]] if drafter == "none" else CHANGING
    options = EngineOptions(
        "law", drafter, schedule=schedule, max_batch=BATCH, max_len=32, block_size=4, seed=seed, synthetic_rates=rates
    )
    draft_model = law_model(seed + 1, num_layers=1, layer_windows=()) if drafter == DRAFT_MODEL else None
    engine = build_engine(options, loaded, draft_model).engine
    params = SamplingParams(max_new_tokens=LENGTH + 1, temperature=1.0, verify=verify, ignore_eos=True)
    outputs = engine.generate([PROMPT] * samples, params)
    power = VOCAB ** np.arange(LENGTH)[::-1]
    cells = np.array([np.dot(output.token_ids[:LENGTH], power) for output in outputs])
    statistic, dof = chi_square(np.bincount(cells, minlength=VOCAB**LENGTH), joint_law(loaded.model, PROMPT, LENGTH))
    drafted, accepted = (sum(sum(at) for at in each) for each in (
        [output.drafted_at for output in outputs], [output.accepted_at for output in outputs]))  # fmt: skip
    # Survival function of the chi-square law.
    p_value = float(torch.special.gammaincc(*torch.tensor([dof / 2, statistic / 2], dtype=torch.float64)))
    return {
        "what": "law" if rates is None else "control, not lossless",
        "drafter": drafter,
        "verify": verify,
        "seed": seed,
        "ks": sorted({key.k for key in engine.graphs.replays}),
        "replays_by_key": engine.graphs.report()["replays_by_key"],
        "samples": samples,
        "replays": engine.graphs.hits,
        "misses": engine.graphs.misses,
        "graphs": len(engine.graphs.captured),
        "cells": VOCAB**LENGTH,
        "statistic": round(statistic, 2),
        "dof": dof,
        "p_value": p_value,
        "accepted_share": round(accepted / drafted, 4) if drafted else None,
    }


def greedy_rows(
    dtype: str, drafters: tuple[str, ...], ks: tuple[int, ...], prompts: int | None, new_tokens: int
) -> Iterator[dict]:
    """A row for each drafter: answers, over all k, that equal plain greedy decoding token for token. In bfloat16 products are
    row-invariant; in float32 they are what they are by default.
    """
    loaded = load_model(GREEDY_MODEL, dtype=DTYPES[dtype], invariant_linear=dtype == "bfloat16")
    records = load_prompts("own")[:prompts]
    ids = [encode_prompt(record.prompt, loaded.tokenizer) for record in records]
    max_len = max(map(len, ids)) + new_tokens + 1

    def answers(drafter: str, k: int) -> list[list[int]]:
        engine = build_engine(EngineOptions(GREEDY_MODEL, drafter, k=k, max_len=max_len), loaded).engine
        return [output.token_ids for output in engine.generate(ids, SamplingParams(max_new_tokens=new_tokens))]

    plain = answers("none", 0)
    for drafter in drafters:
        row = {"what": "greedy", "drafter": drafter, "dtype": dtype, "ks": list(ks), "new_tokens": new_tokens}
        try:
            same = sum(mine == theirs for k in ks for mine, theirs in zip(answers(drafter, k), plain, strict=True))
        except CheckpointError as error:
            yield {**row, "status": f"absent: {error}"}
            continue
        yield {**row, "same": same, "answers": len(plain) * len(ks), "tokens": len(ks) * sum(map(len, plain))}


def measure(quick: bool, seed: int) -> Iterator[dict]:
    """Laws of every drafter by both methods, a control, greedy text; `quick` is a tenth of it."""
    loaded = law_target(seed)
    for drafter in ("ngram",) if quick else DRAFTERS:
        for method in METHODS if drafter != "none" else METHODS[:1]:
            yield law_row(loaded, drafter, method, 200 if quick else 2000, seed)
    yield law_row(loaded, "ngram", "standard", 200 if quick else 2000, seed, LOSSY)
    if quick:
        yield from greedy_rows("float32", ("ngram",), (3,), 2, 12)
    else:
        for dtype in ("float32", "bfloat16"):
            yield from greedy_rows(dtype, GREEDY_DRAFTERS, (1, 3, 7), None, 32)


def _shown(p_value: float) -> str:
    return f"{p_value:.2f}" if p_value >= 0.01 else f"{max(p_value, 1e-12):.0e}"


def table(rows: list[dict]) -> Table:
    header = ["what", "drafter", "verification", "k", "samples or answers", "replays", "accepted", "p-value or same text"]
    lines = []
    for row in rows:
        ks = ", ".join(map(str, row["ks"]))
        if "same" in row:
            same = f"{row['same']} of {row['answers']}"
            lines.append([f"greedy, {row['dtype']}", row["drafter"], "both alike", ks, str(row["answers"]), "", "", same])
        elif "p_value" in row:
            share = "" if row["accepted_share"] is None else f"{100 * row['accepted_share']:.0f} %"
            counts = [str(row["samples"]), str(row["replays"]), share, _shown(row["p_value"])]
            lines.append([row["what"], row["drafter"], row["verify"], ks, *counts])
    absent = [f"{row['drafter']} is {row['status']}." for row in rows if "status" in row]
    note = (
        "Law: Pearson's test of the first three tokens against the target's joint law; small p-values tell laws apart, as in"
        " the control (1e-12: or less). k changes within a run."
    )
    return Table(header, lines, " ".join([note, *absent]))


def headlines(rows: list[dict]) -> list[tuple[str, str]]:
    """The smallest p-value over all laws, the control's, and greedy answers that are plain decoding's."""
    laws, control = ([row for row in rows if row["what"].startswith(what)] for what in ("law", "control"))
    told = []
    if laws:
        replays = sum(row["replays"] for row in laws)
        told = [(f"smallest p-value of {len(laws)} laws, {replays} replays", _shown(min(row["p_value"] for row in laws)))]
    told += [("p-value of a control that is not lossless", _shown(row["p_value"])) for row in control]
    greedy = [row for row in rows if "same" in row]
    for dtype in dict.fromkeys(row["dtype"] for row in greedy):
        same, answers = (sum(row[name] for row in greedy if row["dtype"] == dtype) for name in ("same", "answers"))
        told.append((f"greedy answers equal to plain decoding, {dtype}, all drafters and k", f"{same} of {answers}"))
    return told
