"""`stepgraph simulate`: policies side by side in one world, with regret against the best fixed k and against an oracle."""

import argparse
import json
import time
from dataclasses import replace
from typing import TextIO

import numpy as np
from rich.console import Console
from rich.table import Table

from stepgraph.capture.console import report, shown
from stepgraph.capture.cost_table import CostTable
from stepgraph.capture.policies import ADAPTIVE, FixedPolicy, KPolicy, SchedulePolicy, make_adaptive
from stepgraph.capture.policies.ladder import PUBLISHED, Rungs
from stepgraph.capture.schedule import Schedule, require_int, show
from stepgraph.capture.simulate.arrivals import parse_arrivals
from stepgraph.capture.simulate.closed import fixed_runs, oracle_run, run_policy
from stepgraph.capture.simulate.server import Server, draw_texts, serve
from stepgraph.capture.simulate.worlds import Recorded, leviathan_cost, parse_world
from stepgraph.kernels.output import require_writable

SCHEMA = "stepgraph.simulation/1"
LARGEST_K = 16
# Of a closed world, which is drawn whole and takes some 40 bytes for each.
MOST_COUNTS = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--world", default="iid:0.8", help="iid:RATE, positions:RATE,…, regimes:DWELL:RATE,…/RATE,… or recorded:FILE.jsonl")
    add("--arrivals", default="closed", help="closed, poisson:PER_S, bursty:PER_S:FACTOR:PERIOD_S or csv:FILE")
    cost = parser.add_mutually_exclusive_group()
    cost.add_argument(
        "--cost", action="append", metavar="FILE", help="step times: a profile, or stepgraph plan's JSON; repeatable"
    )
    cost.add_argument("--draft-cost", type=float, default=0.05, help="or a step of 1 + c k ms at every batch: c (default 0.05)")
    add("--ks", help="k to choose from, as 0,1,3 (default: all of the profile, or 0 to 8, or to the recorded k)")
    add(
        "--policy", action="append", default=[], metavar="KIND[:OPTIONS]",
        help="fixed:K, schedule:JSON, ladder, goodput, bandit (options as JSON after a colon); repeatable "
        "(default: ladder, goodput, bandit). goodput and bandit get the world's own step times",
    )  # fmt: skip
    add("--steps", type=int, default=20_000, help="closed: steps")
    add("--batch", type=int, default=1, help="closed: requests in every step")
    add("--requests", type=int, default=500, help="arrivals: how many")
    add("--prompt-tokens", type=int, default=128, help="arrivals: mean, unless the file says")
    add("--output-tokens", type=int, default=128)
    add("--max-batch", type=int, default=32)
    add("--prefill-ms-per-token", type=float, default=0.0)
    add("--lag", type=int, default=0, help="steps launched before a policy sees a result")
    add("--seed", type=int, default=0)
    add("--json", metavar="PATH|-", help="write the figures as JSON; - for standard output")


def run(args: argparse.Namespace) -> int:
    require_writable("--json", args.json)
    require_int("seed", args.seed, 0)
    world, rng = parse_world(args.world), np.random.default_rng(args.seed)
    largest = world.k_max if isinstance(world, Recorded) else None
    ks = _ks(args.ks, LARGEST_K if largest is None else largest)
    default = range(9 if largest is None else largest + 1)
    cost = CostTable.load(*args.cost) if args.cost else CostTable(leviathan_cost(args.draft_cost, ks or default))
    # Nobody knows what would have been accepted beyond the recorded k, so the profile's larger ones are left out.
    ks = ks or [k for k in sorted(cost.ks) if largest is None or k <= largest]
    if not ks:
        raise ValueError(
            f"the recorded steps ran at k = {largest}; the profile has only {', '.join(map(str, sorted(cost.ks)))}"
        )
    if missing := sorted(set(ks) - cost.ks):
        raise ValueError(f"--ks has {missing[0]}; the profile has {', '.join(map(str, sorted(cost.ks)))}")
    cost = CostTable(row for row in cost.rows if row["k"] in ks)  # the world's own table: what policies may choose from
    policies = [(text, make_from(text, cost)) for text in args.policy or list(ADAPTIVE)]
    start_s = time.perf_counter()
    simulate = _closed if args.arrivals == "closed" else _serving
    rows = simulate(args, world, rng, cost, ks, policies)
    document = {
        "schema": SCHEMA, "world": args.world, "arrivals": args.arrivals, "seed": args.seed, "lag": args.lag, "ks": ks,
        "cost": cost.rows, "seconds": round(time.perf_counter() - start_s, 3), "rows": rows,
    }  # fmt: skip
    report(document, args.json, lambda out: _show(rows, out))
    return 0


def _closed(args, world, rng, cost: CostTable, ks: list[int], policies: list[tuple[str, KPolicy]]) -> list[dict]:
    steps, batch = require_int("steps", args.steps, 1, 10**8), require_int("batch", args.batch, 1, 1 << 16)
    require_int("lag", args.lag, 0, 16)
    if steps * batch > MOST_COUNTS:
        raise ValueError(f"steps is {steps} and batch {batch}; steps times batch must be at most {MOST_COUNTS}")
    counts = world.draw(rng, steps, batch, ks[-1])
    fixed, oracle = fixed_runs(counts, cost, ks), oracle_run(counts, cost, ks)
    best = min(fixed, key=lambda run: run.ms_per_token)
    runs = [oracle, *fixed, *(run_policy(name, policy, counts, cost, ks, args.lag) for name, policy in policies)]
    return [
        {
            "name": run.name, "tokens": run.tokens, "tokens_per_busy_s": 1e3 / run.ms_per_token, "steps": run.steps,
            "acceptance_length": run.tokens / run.steps / batch, "switches": run.switches,
            "steps_at_k": {str(k): n for k, n in run.steps_at_k.items()},
            "regret_to_best_fixed": run.regret(best), "regret_to_oracle": run.regret(oracle), "best_fixed": best.name,
        }
        for run in runs
    ]  # fmt: skip


def _serving(args, world, rng, cost: CostTable, ks: list[int], policies: list[tuple[str, KPolicy]]) -> list[dict]:
    arrivals = parse_arrivals(args.arrivals, rng, args.requests, args.prompt_tokens, args.output_tokens)
    server = Server(cost, args.prefill_ms_per_token, args.max_batch, lag=args.lag)
    texts = draw_texts(world, arrivals, rng, ks[-1])
    fixed = [serve(f"fixed:{k}", FixedPolicy(k), server, arrivals, texts) for k in ks]
    oracle = serve("oracle", None, server, arrivals, texts)
    best = max(fixed, key=lambda run: run.tokens_per_busy_ms)
    runs = [oracle, *fixed, *(serve(name, policy, server, arrivals, texts) for name, policy in policies)]
    return [
        run.report()
        | {"regret_to_best_fixed": run.regret(best), "regret_to_oracle": run.regret(oracle), "best_fixed": best.name}
        for run in runs
    ]


def make_from(text: str, cost: CostTable) -> KPolicy:
    """The policy of `KIND[:OPTIONS]`; those that weigh time get `cost` unless the options name another.

    Raises:
        ValueError: it is none.
    """
    kind, _, rest = text.partition(":")
    if kind == "fixed" and rest.isdecimal() and len(rest) < 4:
        return FixedPolicy(int(rest))
    if kind == "schedule" and rest:
        return SchedulePolicy(Schedule.load(rest))
    if kind not in ADAPTIVE:
        raise ValueError(f"--policy is {show(text)}; allowed are fixed:K, schedule:JSON, {', '.join(ADAPTIVE)}")
    try:
        options = json.loads(rest) if rest else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--policy {kind}: the options are not JSON: {error}") from None
    if not isinstance(options, dict):
        raise ValueError(f"--policy {kind}: the options are {show(options)}; they must be an object of names and values")
    if kind == "ladder":
        return make_adaptive(kind, options if "slots" in options else {"slots": _rungs_within(cost.ks), **options})
    return make_adaptive(kind, {"cost": cost, **options})


def _rungs_within(ks: frozenset[int]) -> dict[int, Rungs]:
    """The published ladder on the rungs that this world has: for each of its own the nearest, the larger of two."""

    def nearest(rung: int) -> int:
        return min(ks, key=lambda k: (abs(k - rung), -k))

    return {first: replace(rungs, ks=tuple({nearest(k) for k in rungs.ks})) for first, rungs in PUBLISHED.items()}


def _ks(text: str | None, largest: int) -> list[int] | None:
    if text is None:
        return None
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ValueError(f"--ks is {show(text)}; it must be integers as 0,1,3") from None
    for k in ks:
        require_int("a k in --ks", k, 0, largest)
    return ks


def _show(rows: list[dict], out: TextIO) -> None:
    table = Table(title=None, box=None, pad_edge=False)
    serving = "ttft_ms" in rows[0]
    names = ["policy", "tokens/busy s", "acceptance length", "switches", "regret to best fixed", "to oracle"]
    names += ["tokens/s", "TPOT p50/p90/p99 ms", "TTFT p50/p90/p99 ms"] if serving else []
    for name in [*names, "steps at k"]:
        table.add_column(name, justify="left" if name in ("policy", "steps at k") else "right")
    for row in rows:
        cells = [row["name"], shown(row["tokens_per_busy_s"], 1), shown(row["acceptance_length"]), str(row["switches"])]
        cells += [f"{100 * row['regret_to_best_fixed']:.2f} %", f"{100 * row['regret_to_oracle']:.2f} %"]
        if serving:
            cells.append(shown(row["tokens_per_s"], 1))
            cells += ["/".join(f"{value:.1f}" for value in (row[name] or {}).values()) for name in ("tpot_ms", "ttft_ms")]
        cells.append(" ".join(f"{k}:{n}" for k, n in row["steps_at_k"].items()))
        table.add_row(*cells)
    Console(file=out, width=None if out.isatty() else 200).print(table)
    print(f"best fixed k in hindsight: {rows[0]['best_fixed']}", file=out)
