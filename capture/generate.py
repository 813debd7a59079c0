"""`stepgraph generate`: text from prompts, with whole captured steps."""

import argparse
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from stepgraph.capture.build import AUTO, DTYPES, EngineOptions, build_engine
from stepgraph.capture.console import OrderedStream, graphs_table, progress, stats_table
from stepgraph.capture.engine import Engine
from stepgraph.capture.launched import StepRecord
from stepgraph.capture.metrics import StepMetrics, write_prometheus
from stepgraph.capture.modes import Mode
from stepgraph.capture.policies import ADAPTIVE
from stepgraph.capture.prompts import encode_prompt, read_prompts
from stepgraph.capture.request import VERIFY, FinishReason, RequestOutput, SamplingParams
from stepgraph.capture.schedule import json_object
from stepgraph.kernels.command import INTERRUPTED
from stepgraph.kernels.output import require_writable
from stepgraph.model.drafters.early_stop import KNOWN as EARLY_STOPS
from stepgraph.model.drafters.spec import HELP as DRAFTER_HELP
from stepgraph.model.quantize import HELP as WEIGHTS_HELP
from stepgraph.model.quantize import WEIGHTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults, sampling = EngineOptions(), SamplingParams()
    parser.add_argument("texts", nargs="*", metavar="PROMPT", help="prompt texts (token ids, as 1,2,3, for a random: model)")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help='more prompts, one {"prompt": …} a line')
    parser.add_argument("--model", default=defaults.model, help="smollm2-135m, random:PRESET, directory, .gguf or org/name")
    parser.add_argument("--drafter", help=DRAFTER_HELP)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--k", type=int, help="drafts a step (default 3; on CPUs 1 where more than 2 requests run; 0 without a drafter)"
    )
    choice.add_argument("--schedule", help="k by batch: [[first, last, k], …] as JSON text or a file")
    choice.add_argument("--policy", choices=ADAPTIVE, help="choose k from what is accepted while running")
    parser.add_argument("--policy-options", metavar="JSON", help='of --policy by name, e.g. {"cost": "profile.json"}')
    parser.add_argument("--early-stop", metavar="RULE", help=f"rows stop drafting before k: {EARLY_STOPS}")
    parser.add_argument("--draft-limit", type=int, help="most drafts a step of these requests, whatever k is; 0 is none")
    parser.add_argument("--max-batch", type=int, default=defaults.max_batch, help="most requests at once")
    parser.add_argument("--max-len", type=int, help="most tokens of a request, prompt included (default 2048)")
    parser.add_argument("--max-new-tokens", type=int, default=sampling.max_new_tokens)
    parser.add_argument("--temperature", type=float, default=sampling.temperature, help="0 is greedy")
    parser.add_argument("--top-k", type=int, default=sampling.top_k, help="0 keeps all")
    parser.add_argument("--top-p", type=float, default=sampling.top_p)
    parser.add_argument("--min-p", type=float, default=sampling.min_p)
    parser.add_argument("--seed", type=int, default=defaults.seed, help="prompt i is sampled with seed + i")
    parser.add_argument("--verify", default=defaults.verify, help=f"how drafts are verified: {', '.join(VERIFY)}")
    parser.add_argument(
        "--synthetic-acceptance", metavar="RATE,…",
        help="NOT lossless, for timing only: accept draft i with the i-th of these probabilities; the text means nothing",
    )  # fmt: skip
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    parser.add_argument("--stop-id", action="append", default=[], type=int, metavar="ID", help="end at this token (repeatable)")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end-of-text tokens")
    parser.add_argument(
        "--min-tokens", type=int, default=sampling.min_tokens, help="no stop token or text within this many tokens"
    )
    parser.add_argument("--logit-bias", action="append", default=[], metavar="ID:NUMBER", help="add to a logit (repeatable)")
    parser.add_argument("--repetition-penalty", type=float, default=sampling.repetition_penalty, help="1 is none")
    parser.add_argument("--frequency-penalty", type=float, default=sampling.frequency_penalty)
    parser.add_argument("--presence-penalty", type=float, default=sampling.presence_penalty)
    parser.add_argument("--logprobs", action="store_true", help="with --json: the log-probability of each token")
    parser.add_argument("--dtype", choices=(*DTYPES, AUTO), default=defaults.dtype)
    parser.add_argument("--weights", choices=WEIGHTS, help=WEIGHTS_HELP)
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--mode", choices=[str(mode) for mode in Mode], default=str(Mode.FULL))
    parser.add_argument("--lag", type=int, help="steps in flight when the next is launched: 0 or 1 (default 1 on CUDA, else 0)")
    parser.add_argument("--log-steps", metavar="FILE.jsonl", help="write a JSON line per step: key, k, accepted, padding, lag")
    parser.add_argument("--metrics", metavar="FILE.prom", help="write counters in Prometheus' text format (prometheus-client)")
    parser.add_argument("--graphs", action="store_true", help="end with a table of the captured graphs")
    parser.add_argument("--strict", action="store_true", help="a step without a graph is an error")
    template = parser.add_mutually_exclusive_group()
    template.add_argument("--chat", dest="chat", action="store_true", default=None, help="use the model's chat template")
    template.add_argument("--raw", dest="chat", action="store_false", help="continue the text as it is")
    parser.add_argument("--json", metavar="PATH|-", help="write results as JSON; - makes it the last line of stdout")


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: 0, or 130 after an interrupt (with what was generated until then)."""
    texts = [*args.texts, *(record.prompt for record in (read_prompts(args.prompts) if args.prompts else []))]
    if not texts:
        raise ValueError("no prompt was given; give texts or --prompts FILE.jsonl")
    for option, path in (("--json", args.json), ("--log-steps", args.log_steps), ("--metrics", args.metrics)):
        require_writable(option, path)
    params = SamplingParams(
        args.max_new_tokens, args.temperature, args.top_k, args.top_p, args.min_p,
        stop_ids=tuple(args.stop_id), ignore_eos=args.ignore_eos, stop=tuple(args.stop), min_tokens=args.min_tokens,
        logit_bias=_logit_bias(args.logit_bias), repetition_penalty=args.repetition_penalty,
        frequency_penalty=args.frequency_penalty, presence_penalty=args.presence_penalty, logprobs=args.logprobs,
        draft_limit=args.draft_limit,
    )  # fmt: skip
    options = EngineOptions(
        model=args.model, drafter=args.drafter, k=args.k, schedule=args.schedule, policy=args.policy,
        policy_options=json_object("--policy-options", args.policy_options), max_batch=args.max_batch,
        max_len=args.max_len, dtype=args.dtype, weights=args.weights, device=args.device,
        mode=args.mode, strict=args.strict, seed=args.seed,
        verify=args.verify, lag=args.lag, early_stop=args.early_stop, synthetic_rates=_rates(args.synthetic_acceptance),
    )  # fmt: skip

    # Buckets that no prompt can fill would only be captured.
    options = replace(options, max_batch=min(options.max_batch, len(texts)))

    # With JSON on stdout, what a person reads goes to stderr.
    out = sys.stderr if args.json == "-" else sys.stdout
    engine, name, load_s = build_engine(options)
    print(f"{name} loaded in {load_s:.1f} s", file=sys.stderr)
    prompts = [encode_prompt(text, engine.tokenizer, args.chat) for text in texts]
    engine.graphs.capture(lambda keys: progress(keys, "capturing", "graph"))
    with open(args.log_steps or os.devnull, "w", encoding="utf-8") as log:
        metrics = StepMetrics()

        def on_step(record: StepRecord) -> None:
            metrics.observe(record)
            if args.log_steps is not None:
                print(json.dumps(asdict(record)), file=log)

        if args.log_steps is not None or args.metrics is not None:
            engine.on_step = on_step
        outputs = _generate(engine, texts, prompts, params, out)
    if args.metrics is not None:
        write_prometheus(args.metrics, engine, metrics)
    stats = engine.report()
    if args.json:
        document = {
            "model": name,
            "drafter": options.drafter,
            "verify": args.verify if options.synthetic_rates is None else "synthetic (not lossless)",
            "mode": args.mode,
            "device": str(engine.graphs.step.target.device),
            "dtype": options.dtype,
            "weights": options.weights or options.dtype,
            "requests": [
                {
                    "prompt": text,
                    "text": output.text,
                    "token_ids": output.token_ids,
                    **({} if output.logprobs is None else {"logprobs": output.logprobs}),
                    "finish_reason": str(output.finish_reason),
                }
                for text, output in zip(texts, outputs, strict=True)
            ],
            "stats": stats,
        }
        if args.json != "-":  # kept before anything can go wrong with a terminal
            Path(args.json).write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
    print(file=out)
    stats_table(stats, out)
    if args.graphs:
        print(file=out)
        graphs_table(engine.graphs.rows(), out)
    if options.synthetic_rates is not None:
        print(f"acceptance is SYNTHETIC ({args.synthetic_acceptance}), not lossless: only the timing means anything", file=out)
    if args.json == "-":
        print(json.dumps(document))
    return INTERRUPTED if engine.interrupted else 0


def _generate(
    engine: Engine, texts: list[str], prompts: list[list[int]], params: SamplingParams, out: TextIO
) -> list[RequestOutput]:
    titles = [f"[{i + 1}] {' '.join(text.split())[:100]}" for i, text in enumerate(texts)] if len(texts) > 1 else [""]
    stream = OrderedStream(titles, out)
    # A bar and streamed text would overwrite each other on one terminal; the text is the better progress.
    bar = progress(range(len(texts)), "requests", "request") if len(texts) > 1 and not out.isatty() else None

    def finished(output: RequestOutput) -> None:
        if engine.tokenizer is None:
            stream.text(output.id, ",".join(map(str, output.token_ids)))
        if output.finish_reason is FinishReason.ABORTED:
            stream.text(output.id, " …")
        stream.finish(output.id)
        if bar is not None:
            bar.update()

    try:
        return engine.generate(prompts, params, on_text=stream.text, on_finish=finished)
    finally:
        if bar is not None:
            bar.close()


def _logit_bias(entries: list[str]) -> dict[int, float]:
    bias = {}
    for entry in entries:
        token, _, number = entry.rpartition(":")
        try:
            token, number = int(token), float(number)
        except ValueError:
            raise ValueError(f"--logit-bias is {entry!r}; allowed is ID:NUMBER, for example 11:-2.5") from None
        if token in bias:
            raise ValueError(f"--logit-bias names token {token} twice; allowed is once")
        bias[token] = number
    return bias


def _rates(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(rate) for rate in text.split(","))
    except ValueError:
        raise ValueError(f"--synthetic-acceptance is {text!r}; allowed are numbers in [0, 1], as in 0.8,0.6") from None
