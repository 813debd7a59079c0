"""`stepgraph bench serve`: the engine under an arrival trace on this machine, and what the simulator says of the same trace."""

import argparse
from dataclasses import replace
from itertools import cycle, islice

import numpy as np
from rich.console import Console
from rich.table import Table

from stepgraph.capture.build import AUTO, DTYPES, EngineOptions, build_engine, load_target
from stepgraph.capture.console import progress, report, shown
from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.experiments.prompt_sets import load_prompts
from stepgraph.capture.policies import ADAPTIVE, make_adaptive, policy_from_dict
from stepgraph.capture.policies.adaptive import checked_ks
from stepgraph.capture.profile.measure import measure_costs, measure_prefill
from stepgraph.capture.prompts import encode_prompt
from stepgraph.capture.request import SamplingParams
from stepgraph.capture.schedule import json_object, require_int
from stepgraph.capture.serve import serve_engine, texts_of
from stepgraph.capture.simulate.arrivals import parse_arrivals
from stepgraph.capture.simulate.server import Server, serve
from stepgraph.kernels.environment import environment
from stepgraph.kernels.output import require_writable
from stepgraph.model.drafters.spec import HELP as DRAFTER_HELP
from stepgraph.model.quantize import HELP as WEIGHTS_HELP
from stepgraph.model.quantize import WEIGHTS

SCHEMA = "stepgraph.serving/1"
LATENCIES = ("ttft_ms.p50", "ttft_ms.p90", "tpot_ms.p50", "tpot_ms.p90")
KS = (0, 1, 3, 5)  # of a policy, unless its options say
FIGURES = ("tokens_per_s", "tokens_per_busy_s", *LATENCIES, "steps", "mean_batch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = EngineOptions()
    add = parser.add_argument
    add("--model", default=defaults.model, help="as of stepgraph generate")
    add("--drafter", help=DRAFTER_HELP)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--k", type=int, help="drafts a step")
    choice.add_argument("--schedule", help="k by batch")
    choice.add_argument("--policy", choices=ADAPTIVE, help="goodput and bandit get the step times measured here")
    add("--policy-options", metavar="JSON")
    add("--arrivals", default="poisson:1", help="poisson:PER_S, bursty:PER_S:FACTOR:PERIOD_S or csv:FILE")
    add("--requests", type=int, default=24, help="how many, unless the file says")
    add("--prompt-tokens", type=int, default=32, help="mean, unless the file says")
    add("--output-tokens", type=int, default=32)
    add("--max-batch", type=int, default=4)
    add("--max-len", type=int, help="most tokens of a request (default: what the longest needs)")
    add("--temperature", type=float, default=0.0)
    add("--dtype", choices=(*DTYPES, AUTO), default=defaults.dtype)
    add("--weights", choices=WEIGHTS, help=WEIGHTS_HELP)
    add("--device", help="cpu or cuda (default: cuda where there is one)")
    add("--rounds", type=int, default=9, help="replays of each (batch, k) for the simulator's step times")
    add("--seed", type=int, default=0)
    add("--json", metavar="PATH|-", help="write the figures as JSON; - for standard output")


def run(args: argparse.Namespace) -> int:
    require_writable("--json", args.json)
    rng = np.random.default_rng(require_int("seed", args.seed, 0))
    rounds = require_int("rounds", args.rounds, 1, 1000)
    arrivals = parse_arrivals(args.arrivals, rng, args.requests, args.prompt_tokens, args.output_tokens)
    longest = int((arrivals.prompt + arrivals.output).max())
    max_len = longest if args.max_len is None else args.max_len
    if longest > max_len:
        raise ValueError(f"max_len is {max_len}; the longest request has {longest} tokens")
    options = EngineOptions(
        args.model, args.drafter, k=args.k, schedule=args.schedule, max_batch=args.max_batch, max_len=max_len,
        dtype=args.dtype, weights=args.weights, device=args.device, seed=args.seed, kv_memory_bytes=4 << 30,
    )  # fmt: skip
    given = json_object("--policy-options", args.policy_options) or {}
    ks = sorted(_policy_ks(args.policy, given) if args.policy else options.make_policy().ks)
    loaded = load_target(options)
    cost = CostTable(_step_times(options, loaded, ks, arrivals, rounds))
    if args.policy:
        needs_cost = {"cost": cost} if args.policy != "ladder" else {"slots": {"1": {"ks": ks}}}
        options = replace(options, policy=args.policy, policy_options={**needs_cost, **given})
    engine = build_engine(options, loaded).engine
    engine.graphs.capture()
    fresh = engine.policy.to_dict()
    prompts = _prompts(arrivals, loaded)
    name = engine.policy.kind
    observed = serve_engine(name, engine, arrivals, prompts, SamplingParams(temperature=args.temperature))
    server = Server(cost, measure_prefill(options, loaded), args.max_batch, engine.prefill_chunk, engine.lag)
    texts = texts_of(observed, arrivals, max(ks), rng)
    simulated = serve(name, policy_from_dict(fresh), server, arrivals, texts)
    rows = {"engine": observed.run.report(), "simulator": simulated.report()}
    errors = {figure: _error(*(_of(rows[run], figure) for run in ("simulator", "engine"))) for figure in FIGURES}
    document = {
        "schema": SCHEMA, "model": loaded.name, "drafter": options.drafter, "policy": fresh | {"cost": None}, "seed": args.seed,
        "arrivals": args.arrivals, "env": environment(), "cost": cost.rows, "prefill_ms_per_token": server.prefill_ms_per_token,
        **rows, "errors": errors,
    }  # fmt: skip
    report(document, args.json, lambda out: _show(rows, errors, out))
    return 0


def _policy_ks(kind: str, given: dict) -> frozenset[int]:
    """Every k that the policy may ask for, which are those to time. Its options are refused here, before anything runs."""
    ks = checked_ks(given["ks"]) if given.get("ks") is not None else KS
    if kind == "ladder":
        return make_adaptive(kind, {"slots": {"1": {"ks": KS}}, **given}).ks
    untimed = CostTable({"batch": 1, "k": k, "context": 0, "step_ms": 1.0} for k in ks)
    return make_adaptive(kind, {"cost": untimed, **given}).ks


def _step_times(options: EngineOptions, loaded, ks: list[int], arrivals, rounds: int) -> list[dict]:
    batches = sorted({min(1 << power, options.max_batch) for power in range(options.max_batch.bit_length() + 1)})
    lengths = arrivals.prompt + arrivals.output // 2
    contexts = sorted({max(2, int(np.quantile(lengths, q))) for q in (0.1, 0.9)})

    return measure_costs(
        options, loaded, batches, ks, contexts, rounds, lambda items, total: progress(items, "timing", "replay", total)
    )


def _prompts(arrivals, loaded) -> list[list[int]]:
    """Prompts of the wanted lengths, from the repository's own texts; of plain numbers where there is no tokenizer."""
    if loaded.tokenizer is None:
        vocab = loaded.model.config.vocab_size
        return [[token % vocab for token in range(7, 7 + int(length))] for length in arrivals.prompt]
    texts = [encode_prompt(record.prompt, loaded.tokenizer) for record in load_prompts("own")]
    return [list(islice(cycle(texts[n % len(texts)]), int(length))) for n, length in enumerate(arrivals.prompt)]


def _of(report: dict, figure: str) -> float | None:
    """A figure of the report; None where the run has none, as time per further token when no answer has a second."""
    name, _, part = figure.partition(".")
    return report[name][part] if part and report[name] is not None else report[name]


def _error(simulated: float | None, real: float | None) -> float | None:
    return simulated / real - 1 if simulated is not None and real else None


def _show(rows: dict, errors: dict, out) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("", *rows, "error"):
        table.add_column(name, justify="left" if not name else "right")
    for figure in FIGURES:
        values = [shown(_of(report, figure)) for report in rows.values()]
        table.add_row(figure, *values, "" if errors[figure] is None else f"{100 * errors[figure]:+.1f} %")
    Console(file=out, width=None if out.isatty() else 120).print(table)
