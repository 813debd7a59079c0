"""`stepgraph plan`: graphs, launches, bytes and predicted times of a model on a GPU that need not be here."""

import argparse
import json
from dataclasses import replace
from typing import TextIO

from rich.console import Console
from rich.table import Table

from stepgraph.capture.build import DTYPES
from stepgraph.capture.console import progress, report
from stepgraph.capture.phases import PHASES
from stepgraph.capture.plan.gpus import GPUS, gpu_named
from stepgraph.capture.plan.kernels import compiled_kernels, kernels_from_gate, unknown_kernels
from stepgraph.capture.plan.overhead import Overhead
from stepgraph.capture.plan.plan import MODE_KEYS, Plan, make_plan
from stepgraph.capture.plan.plot import plot_plan, require_plot
from stepgraph.capture.plan.shapes import StepShapes
from stepgraph.capture.policies import make_policy
from stepgraph.capture.request import require_number
from stepgraph.capture.schedule import require_int
from stepgraph.kernels.output import require_writable
from stepgraph.model.drafters.spec import KNOWN as KNOWN_DRAFTERS

DEFAULT_K = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    overhead = Overhead()
    parser.add_argument("--model", default="llama-3.1-8b", help="a preset, a Hugging Face directory or a .gguf file")
    parser.add_argument("--drafter", default="ngram", help=KNOWN_DRAFTERS)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--k", type=int, help=f"drafts a step (default {DEFAULT_K}; 0 without a drafter)")
    choice.add_argument("--schedule", help="k by batch: [[first, last, k], …] as JSON text or a file")
    parser.add_argument("--hold-steps", type=int, default=0, help="hysteresis of the schedule in steps; adds a few graphs")
    parser.add_argument("--max-batch", type=int, default=64, help="most requests at once")
    parser.add_argument("--context", type=int, default=2048, help="tokens in the cache of each request")
    parser.add_argument("--block-size", type=int, default=16, help="tokens in a KV block")
    parser.add_argument("--dtype", choices=[name for name in DTYPES if name != "float64"], default="bfloat16")
    parser.add_argument("--gpu", default="h200", help=", ".join(GPUS))
    parser.add_argument("--rungs", help="bucket sizes, as 1,2,4,8 (default: dense where batches are small)")
    parser.add_argument("--acceptance", default="0.8", help="acceptance by position, as 0.8,0.7; the last for later ones")
    parser.add_argument("--node-us", type=float, default=overhead.node_us, help="assumed gap between kernels, microseconds")
    parser.add_argument("--launch-us", type=float, default=overhead.launch_us, help="assumed host time of a graph launch")
    parser.add_argument("--eager-op-us", type=float, default=overhead.eager_op_us, help="assumed host time of an eager op")
    kernels = parser.add_mutually_exclusive_group()
    kernels.add_argument("--compile", action="store_true", help="compile the kernels for the GPU and show what they take")
    kernels.add_argument("--gate", metavar="FILE", help="read what they take from `stepgraph compile --json FILE`")
    parser.add_argument("--plot", metavar="FILE.png|.svg", help="draw the steps' phases")
    parser.add_argument("--measure", action="store_true", help="time the steps here and show measured beside predicted (CUDA)")
    parser.add_argument("--json", metavar="PATH|-", help="write the plan as JSON; - makes it the last line of stdout")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status."""
    if args.measure:
        from stepgraph.capture.plan.measure import measure, require_cuda

        require_cuda()
    require_writable("--json", args.json)
    if args.plot:
        require_plot(args.plot)
    gpu = gpu_named(args.gpu)
    acceptance = _numbers("--acceptance", args.acceptance, float)
    for rate in acceptance:
        require_number("an entry of --acceptance", rate, 0.0, 1.0)
    overhead = Overhead(args.node_us, args.launch_us, args.eager_op_us)
    for name, value in (("--node-us", args.node_us), ("--launch-us", args.launch_us), ("--eager-op-us", args.eager_op_us)):
        require_number(name, value, 0.0, 1e6)
    require_int("--context", args.context, 1)
    require_int("--hold-steps", args.hold_steps, 0)
    require_int("--max-batch", args.max_batch, 1, 4096)
    require_int("--block-size", args.block_size, 1, 1024)
    k = args.k
    if k is None and args.schedule is None:
        k = 0 if args.drafter == "none" else DEFAULT_K
    policy = make_policy(k, args.schedule, hold_steps=args.hold_steps)
    if args.drafter == "none" and max(policy.ks) > 0:
        raise ValueError(f"--drafter is 'none'; without a drafter only k=0 is possible, not k={max(policy.ks)}")
    rungs = None if args.rungs is None else _numbers("--rungs", args.rungs, int)

    most_k = max(policy.ks)
    shapes = StepShapes(
        args.model, args.drafter, max_batch=args.max_batch, max_len=args.context + most_k + 1, k_max=most_k,
        block_size=args.block_size, dtype=DTYPES[args.dtype],
    )  # fmt: skip
    plan, launches = make_plan(
        shapes, policy, gpu, context=args.context, acceptance=acceptance, overhead=overhead, rungs=rungs,
        progress=lambda keys: progress(keys, "planning", "graph"),
    )  # fmt: skip
    if args.compile:
        kernels = compiled_kernels(launches)
    else:
        kernels = kernels_from_gate(launches, args.gate) if args.gate else unknown_kernels(launches)
    named = {"model": args.model, "drafter": args.drafter, "schedule": args.schedule, "k": k, "max_batch": args.max_batch}
    plan = replace(plan, kernels=kernels, assumptions=named | plan.assumptions)
    document = plan.to_json()
    if args.measure:
        document["measured"] = measure(plan, args.model, args.drafter, args.dtype, args.block_size, args.context)

    if args.plot:
        plot_plan(plan, args.plot)
    report(document, args.json, lambda out: print_plan(plan, out, document.get("measured", [])))
    return 0


def print_plan(plan: Plan, out: TextIO, measured: list[dict]) -> None:
    """The plan as tables: keys, rung sets, kernels, assumptions."""
    console = Console(file=out, width=max(150, Console(file=out).width))
    by_key = {(row["batch"], row["k"]): row for row in measured}
    keys = Table(box=None, pad_edge=False, title="predicted, µs a step" + (" (measured)" if measured else ""))
    for name in ("batch", "k", "launches", "MiB", "GFLOP", "roofline", *PHASES, *(m.lower() for m in MODE_KEYS), "TPOT"):
        keys.add_column(name, justify="right")
    for key in plan.keys:
        found = by_key.get((key.batch, key.k), {})
        modes = [f"{key.modes[name]:.0f}" + (f" ({found[name]:.0f})" if name in found else "") for name in MODE_KEYS.values()]
        shares = [f"{100 * key.phases[name] / key.time_us:.0f}%" for name in PHASES]
        keys.add_row(
            str(key.batch), str(key.k), str(key.launches), f"{key.bytes / 2**20:.0f}", f"{key.flops / 1e9:.1f}",
            f"{key.time_us:.0f}", *shares, *modes, f"{key.tpot_us:.0f}",
        )  # fmt: skip
    console.print(keys)
    padding = plan.padding
    console.print(
        f"\n{len(plan.keys)} graphs, {len(padding.misses)} misses, "
        f"padding {padding.mean:.1%} mean and {padding.worst:.1%} worst; "
        f"weights {plan.weight_bytes / 2**30:.1f} GiB, KV {plan.kv_bytes / 2**30:.1f} GiB, "
        f"graph pool {plan.pool_bytes / 2**20:.0f} MiB\n"
    )
    rungs = Table(box=None, pad_edge=False)
    for name in ("buckets", "graphs", "mean padding", "worst padding"):
        rungs.add_column(name, justify="left" if name == "buckets" else "right")
    for name, (graphs, mean, worst) in plan.rung_sets.items():
        rungs.add_row(name, str(graphs), f"{mean:.1%}", f"{worst:.1%}")
    console.print(rungs)
    table = Table(box=None, pad_edge=False)
    for name in ("kernel", "arch", "registers", "shared bytes", "spills"):
        table.add_column(name, justify="left" if name in ("kernel", "arch") else "right")
    for row in plan.kernels:
        figures = (row["registers"], row["shared_bytes"], row["spills"])
        table.add_row(row["name"], row["arch"], *("–" if figure is None else str(figure) for figure in figures))
    console.print()
    console.print(table)
    if any(row["registers"] is None for row in plan.kernels):
        console.print("(registers, shared memory and spills: --compile, or --gate FILE)")
    console.print("\nassumed: " + json.dumps(plan.assumptions), highlight=False)


def _numbers(option: str, text: str, kind: type) -> list:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} is {text!r}; allowed are numbers separated by commas") from None
