"""The demonstration that `make demo` runs: the same prompts speculatively and plainly, side by side."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from stepgraph.capture.build import AUTO, DTYPES, EngineOptions, build_engine, load_target
from stepgraph.capture.cli import Parser, guarded
from stepgraph.capture.console import progress, shown
from stepgraph.capture.engine import Engine
from stepgraph.capture.prompts import encode_prompt, read_prompts
from stepgraph.capture.request import RequestOutput, SamplingParams
from stepgraph.model.drafters.spec import HELP as DRAFTER_HELP

PROMPTS = Path(__file__).resolve().parents[1] / "benchmarks" / "prompts.jsonl"
CHOSEN = ("summarise-2", "code-3", "maths-3", "chat-3")


def main() -> int:
    defaults = EngineOptions()
    parser = Parser(prog="python -m stepgraph.capture.demo", description=__doc__)
    parser.add_argument("--model", default=defaults.model)
    parser.add_argument("--drafter", help=DRAFTER_HELP)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument(
        "--dtype", choices=(*DTYPES, AUTO), default=AUTO, help="auto: bfloat16 where this machine is fast at it"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--prompts", default=str(PROMPTS), help="JSON lines; the demo's own four, or all of another file")
    args = parser.parse_args()
    return guarded(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 100)
    records = read_prompts(args.prompts)
    if args.prompts == str(PROMPTS):
        records = [record for record in records if record.id in CHOSEN]
    plain_options = EngineOptions(model=args.model, drafter="none", k=0, dtype=args.dtype, max_batch=1)
    # In float32 products of one row and of several agree on all texts tried; in bfloat16 they have to be made to.
    plain_options = replace(plain_options, invariant_linear=plain_options.dtype in ("bfloat16", "float16"))
    speculative_options = replace(plain_options, drafter=args.drafter, k=args.k)
    params, drafter = SamplingParams(max_new_tokens=args.max_new_tokens), speculative_options.drafter

    speculative_options.make_policy()  # refuses a bad k before the model is loaded
    loaded = load_target(plain_options)
    console.print(f"{loaded.name} loaded in {loaded.load_s:.1f} s, {plain_options.dtype}")
    engines = [build_engine(options, loaded).engine for options in (speculative_options, plain_options)]
    for engine in engines:
        engine.graphs.capture(lambda keys: progress(keys, "capturing", "graph"))
    capture_s = sum(engine.graphs.report()["capture_s"] for engine in engines)
    console.print(f"two whole steps captured in {capture_s:.1f} s: k={args.k} with {drafter}, and plain k=0\n")

    table = Table("prompt", "tokens", "acceptance\nlength", "plain\ntokens/s", f"{drafter}\ntokens/s", "ratio", "same text")
    all_same = True
    for record in records:
        ids = encode_prompt(record.prompt, loaded.tokenizer)
        # Interleaved, prompt by prompt: a busy machine then slows both alike.
        outputs = [_one(engine, ids, params) for engine in engines]
        (fast, fast_rate), (slow, slow_rate) = outputs
        same = fast.token_ids == slow.token_ids
        all_same &= same
        console.print(f"[bold]{record.id}[/bold] {' '.join(record.prompt.split())[:90]}…", markup=True)
        console.print(fast.text.strip() + "\n", markup=False)
        if not same:
            console.print("plain decoding says instead:\n" + slow.text.strip() + "\n", markup=False)
        table.add_row(
            record.id, str(len(fast.token_ids)), shown(len(fast.token_ids) / fast.steps), shown(slow_rate, 1),
            shown(fast_rate, 1), shown(fast_rate / slow_rate), "yes" if same else "no",
        )  # fmt: skip
    console.print(table)
    reports = [engine.report() for engine in engines]
    ratio = reports[0]["tokens_per_s"] / reports[1]["tokens_per_s"]
    console.print(
        f"texts equal: {'yes' if all_same else 'no'}; acceptance length {shown(reports[0]['acceptance_length'])} "
        f"({shown(reports[0]['drafted_per_step'])} drafted, {shown(reports[0]['accepted_per_step'])} accepted a step); "
        f"{shown(reports[0]['tokens_per_s'], 1)} against {shown(reports[1]['tokens_per_s'], 1)} tokens/s, ratio {ratio:.2f}"
    )
    return 0


def _one(engine: Engine, ids: list[int], params: SamplingParams) -> tuple[RequestOutput, float]:
    """One request, and its tokens per second, prefill included."""
    before_s = engine.stats.elapsed_s
    (output,) = engine.generate([ids], params)
    if engine.interrupted:
        raise KeyboardInterrupt
    return output, len(output.token_ids) / (engine.stats.elapsed_s - before_s)


if __name__ == "__main__":
    sys.exit(main())
