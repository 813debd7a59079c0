"""`stepgraph profile`: measure T(batch, k) and acceptance here, and write them with the schedule of most goodput."""

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stepgraph.capture.build import AUTO, DTYPES, EngineOptions, load_target
from stepgraph.capture.console import progress
from stepgraph.capture.cost_table import SCHEMA, CostTable
from stepgraph.capture.experiments.prompt_sets import PUBLIC, load_prompts, spread
from stepgraph.capture.modes import Mode
from stepgraph.capture.profile.measure import best_schedule, measure_acceptance, measure_costs, measure_prefill
from stepgraph.capture.request import SamplingParams
from stepgraph.capture.schedule import SCHEDULE_KEY, require_int, show
from stepgraph.kernels.environment import environment
from stepgraph.kernels.output import require_writable, write_whole
from stepgraph.model.drafters.spec import HELP as DRAFTER_HELP
from stepgraph.model.quantize import HELP as WEIGHTS_HELP
from stepgraph.model.quantize import WEIGHTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = EngineOptions()
    add = parser.add_argument
    add("--model", default=defaults.model, help="as of stepgraph generate")
    add("--drafter", help=DRAFTER_HELP)
    add("--batches", default="1,2,4,8", help="batch sizes to time (default 1,2,4,8)")
    add("--ks", default="0,1,2,3,5", help="k to time (default 0,1,2,3,5)")
    add("--contexts", default="256", help="tokens in the cache of each request (default 256)")
    add("--rounds", type=int, default=15, help="replays of each; their median counts")
    add("--prompts", default="own", help=f"acceptance over these: own, {', '.join(PUBLIC)}, or a prompts file; none to skip")
    add("--limit", type=int, default=8, help="at most so many prompts, spread over the set")
    add("--max-new-tokens", type=int, default=48)
    add("--temperature", type=float, default=0.0)
    add("--max-batch", type=int, help="the schedule's largest batch (default: the largest timed)")
    add("--dtype", choices=(*DTYPES, AUTO), default=defaults.dtype)
    add("--weights", choices=WEIGHTS, help=WEIGHTS_HELP)
    add("--device", help="cpu or cuda (default: cuda where there is one)")
    add("--mode", choices=[str(mode) for mode in Mode], default=str(Mode.FULL))
    add("--seed", type=int, default=0)
    add("--out", metavar="PATH", required=True, help="the profile; --schedule and --cost read it")


def run(args: argparse.Namespace) -> int:
    batches, ks, contexts = (
        _numbers(name, text, low) for name, text, low in (
            ("--batches", args.batches, 1), ("--ks", args.ks, 0), ("--contexts", args.contexts, 1))
    )  # fmt: skip
    rounds, limit = require_int("--rounds", args.rounds, 1, 10_000), require_int("--limit", args.limit, 1)
    max_batch = max(batches) if args.max_batch is None else require_int("--max-batch", args.max_batch, 1, 1 << 16)
    params = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature)
    require_writable("--out", args.out)
    drafter = args.drafter if max(ks) else "none"
    options = EngineOptions(
        args.model,
        drafter,
        k=max(ks),
        dtype=args.dtype,
        weights=args.weights,
        device=args.device,
        mode=args.mode,
        seed=args.seed,
    )
    prompts = [] if args.prompts == "none" or not max(ks) else [record.prompt for record in load_prompts(args.prompts)]
    loaded = load_target(options)
    if prompts and loaded.tokenizer is None:
        raise ValueError(f"--prompts is {args.prompts!r}; {loaded.name} has no tokenizer, so give --prompts none")

    acceptance = None
    if prompts:
        acceptance = measure_acceptance(options, loaded, max(ks), spread(prompts, limit), params)
    rows = measure_costs(
        options, loaded, batches, ks, contexts, rounds, lambda items, total: progress(items, "timing", "replay", total)
    )
    document = {
        "schema": SCHEMA, "model": loaded.name, "drafter": options.drafter, "dtype": options.dtype,
        "weights": options.weights or options.dtype, "mode": args.mode,
        "temperature": args.temperature, "env": environment(), "prefill_ms_per_token": measure_prefill(options, loaded),
        "rows": rows, "acceptance": acceptance,
    }  # fmt: skip
    if acceptance is not None:
        document[SCHEDULE_KEY] = best_schedule(CostTable(rows), acceptance["reached"], max_batch, min(contexts))
    write_whole(Path(args.out), json.dumps(document, indent=1) + "\n")
    _show(document)
    return 0


def _numbers(name: str, text: str, low: int) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"{name} is {show(text)}; it must be integers as 1,2,4") from None
    for number in numbers:
        require_int(f"a number in {name}", number, low, 1 << 20)
    return numbers


def _show(document: dict) -> None:
    table = Table(box=None, pad_edge=False)
    ks = sorted({row["k"] for row in document["rows"]})
    table.add_column("batch", justify="right")
    table.add_column("context", justify="right")
    for k in ks:
        table.add_column(f"k = {k}, ms", justify="right")
    by_place = {(row["batch"], row["context"], row["k"]): row for row in document["rows"]}
    for batch, context in sorted({place[:2] for place in by_place}):
        cells = [f"{by_place[batch, context, k]['step_ms']:.2f}" for k in ks]
        table.add_row(str(batch), str(context), *cells)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if document["acceptance"] is not None:
        rates = " ".join(f"{rate:.2f}" for rate in document["acceptance"]["per_position"])
        print(f"acceptance by position {rates}; acceptance length {document['acceptance']['acceptance_length']:.2f}")
        print(f"schedule {json.dumps(document[SCHEDULE_KEY])}")
