"""Train an EAGLE-3 head for a target on text that the target writes itself: `python -m stepgraph.model.drafters.train_eagle3`.

Writes into the folder `--out`: `self-prompts.jsonl` (with `--self-prompts`), `data/` (texts, in shards), `state.pt` (where
training is), `hidden.bin` (the target's hidden states; may be deleted when training has ended), and `head/`, the head in the
public layout with its `card.json`. Run again with the same arguments it goes on where it was; more `--data-minutes` or
`--max-tokens` add to the data, but not once training has begun.
"""

import argparse
import copy
import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from tqdm.auto import tqdm

from stepgraph.kernels.output import write_whole
from stepgraph.model.checkpoint import LoadedModel, load_model
from stepgraph.model.checkpoint.eagle3 import load_eagle3, save_eagle3
from stepgraph.model.drafters.training.card import CARD, card
from stepgraph.model.drafters.training.corpus import Corpus
from stepgraph.model.drafters.training.generate import write_texts
from stepgraph.model.drafters.training.prompts import asked_by, encode, prompt_stream
from stepgraph.model.drafters.training.start import copy_in_float32, new_head, widened
from stepgraph.model.drafters.training.trainer import Trainer, TrainOptions
from stepgraph.model.quantize import WEIGHTS, quantize_int8
from stepgraph.model.transformer import Transformer, pack_weights

DRAFT_VOCAB = 8192
LEAST = {"self_prompts": 0, "rows": 1, "shard_texts": 1, "max_len": 2, "passes": 1}  # what options have to be at least
MODULE = "python -m stepgraph.model.drafters.train_eagle3"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=MODULE, description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--target", default="smollm2-135m", help="model to draft for, as for stepgraph generate --model")
    add("--out", type=Path, required=True, help="working folder; the head is written to OUT/head")
    add("--prompts", nargs="*", default=[], metavar="FILE", help="prompt files (.jsonl with prompt, or a text a line)")
    add("--self-prompts", type=int, default=0, metavar="N", help="N more prompts, written by the target as if it were the user")
    add(
        "--text-weights",
        choices=WEIGHTS,
        help="what the texts are written with, instead of the target as it is; the head learns from the target as it is",
    )
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], help="each text is written at one of these")
    add("--data-minutes", type=float, help="stop writing texts after this long (default 20, unless --max-tokens is given)")
    add("--max-tokens", type=int, help="stop writing texts at this many tokens")
    add("--train-minutes", type=float, help="stop training after this long")
    add("--train-tokens", type=int, help="stop training after this many tokens (default: --epochs)")
    add("--epochs", type=float, default=3.0)
    add("--rows", type=int, default=128, help="texts written at the same time")
    add("--shard-texts", type=int, default=512, help="texts in a file")
    add("--max-len", type=int, default=256, help="most tokens of a text, prompt included")
    add("--draft-vocab", type=int, help="tokens the head can propose: those the target writes most (default 8192)")
    add("--passes", type=int, default=3, help="unrolled steps of the training-time test")
    add("--batch-tokens", type=int, default=4096)
    add("--lr", type=float, default=1e-3)
    add("--kv-heads", type=int, help="KV heads of the head (default: the target's)")
    add("--inner", type=int, help="MLP width of the head (default: the target's)")
    add(
        "--frozen-head",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="leave the output rows as they are; those of a new head are the target's",
    )
    add(
        "--start-from",
        type=Path,
        metavar="HEAD",
        help="go on from this head, with its sizes and draft vocabulary (widened by --draft-vocab)",
    )
    add("--warm-start", action=argparse.BooleanOptionalAction, default=True, help="start from the target's last layer")
    add(
        "--store-hidden",
        action=argparse.BooleanOptionalAction,
        help="keep the target's hidden states on disk (default: on CPUs)",
    )
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of the target; auto measures which is faster")
    add("--threads", type=int, help="CPU threads")
    return parser


def check_options(args: argparse.Namespace) -> None:
    """A ValueError for a number that an option cannot be."""
    for name, least in LEAST.items():
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed is {least} or more")
    for temperature in args.temperatures:
        if not 0 <= temperature < math.inf:
            raise ValueError(f"--temperatures has {temperature}; allowed are finite numbers, 0 or more")


def faster_dtype(device: str) -> torch.dtype:
    """bfloat16 where the matrix units have it (CUDA, AMX), float32 where it is emulated."""
    if device != "cpu":
        return torch.bfloat16
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.ones(128, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        for _ in range(2):  # the first call sets up
            start_s = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            seconds[dtype] = time.perf_counter() - start_s
    return min(seconds, key=seconds.__getitem__)


def writer_of(target: Transformer, weights: str | None) -> Transformer:
    """What texts are written with: the target, or a copy of it with int8 weights, somewhat faster on a CPU."""
    if weights is None:
        return target
    writer = copy.deepcopy(target)
    quantize_int8(writer)
    pack_weights(writer)
    return writer


def self_prompts(loaded: LoadedModel, writer: Transformer, args: argparse.Namespace) -> list[Path]:
    """The file of prompts that the target has written, in a list; none where none are asked for."""
    if args.self_prompts == 0:
        return []
    path = args.out / "self-prompts.jsonl"
    if not path.exists():
        asked = asked_by(writer, loaded.tokenizer, args.self_prompts, args.rows, args.seed)
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in tqdm(asked, "prompts", args.self_prompts)]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(lines))
    return [path]


def write_data(loaded: LoadedModel, corpus: Corpus, args: argparse.Namespace) -> None:
    """Add shards to the corpus until its budget of minutes or tokens is spent."""
    minutes = args.data_minutes if args.data_minutes is not None else (None if args.max_tokens else 20.0)

    def left() -> bool:
        return (args.max_tokens is None or corpus.tokens < args.max_tokens) and (
            minutes is None or corpus.seconds < 60 * minutes
        )

    if not left():
        return
    target, tokenizer = writer_of(loaded.model, args.text_weights), loaded.tokenizer
    files = [*args.prompts, *self_prompts(loaded, target, args)]
    eos = tokenizer.eos_token_ids if tokenizer else target.config.eos_token_ids
    with tqdm(desc="writing", unit="tok", unit_scale=True, initial=corpus.tokens, total=args.max_tokens) as bar:
        while left():
            # Shard i depends on the seed and on i alone, so an interrupted run writes the same ones.
            stream = islice(prompt_stream(files, args.seed), corpus.prompts, corpus.prompts + args.shard_texts)
            prompts = (encode(text, tokenizer, target.config.vocab_size, args.max_len // 2) for text in stream)
            start_s, before_s, texts = time.perf_counter(), corpus.seconds, []

            def out_of_time(start_s: float = start_s, before_s: float = before_s) -> bool:
                return minutes is not None and before_s + time.perf_counter() - start_s >= 60 * minutes

            seed = args.seed * 1_000_003 + corpus.shards
            options = {"rows": min(args.rows, args.shard_texts), "max_len": args.max_len, "eos": eos, "seed": seed}
            options["temperatures"] = tuple(args.temperatures)
            for text in write_texts(target, prompts, out_of_time=out_of_time, **options):
                texts.append(text)
                bar.update(len(text.tokens) - text.prompt_len)
            if texts:
                corpus.add(texts, time.perf_counter() - start_s, args.shard_texts)
            else:
                break


def train(args: argparse.Namespace) -> dict:
    """Data, training, head and card; returns the card."""
    check_options(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = faster_dtype(args.device) if args.dtype == "auto" else getattr(torch, args.dtype)
    loaded = load_model(args.target, dtype=dtype, device=args.device, max_positions=args.max_len + args.passes)
    target, corpus = loaded.model, Corpus(args.out / "data")
    state, vocab = args.out / "state.pt", target.config.vocab_size
    # Before the texts are written: a head that does not fit should not be found out half an hour later.
    head = None if args.start_from is None else copy_in_float32(load_eagle3(args.start_from, target))
    if head is not None and args.draft_vocab is not None and args.draft_vocab < head.eagle.draft_vocab_size:
        raise ValueError(
            f"--draft-vocab is {args.draft_vocab}; allowed with --start-from is {head.eagle.draft_vocab_size}, what the head"
            " has, or more"
        )
    if not state.exists():
        write_data(loaded, corpus, args)
    if not corpus.texts:
        raise ValueError(
            f"{args.out / 'data'} has no texts, and the budget for data is spent; give --data-minutes or --max-tokens"
        )
    if head is not None and args.draft_vocab is not None:
        head = widened(head, target, corpus.draft_vocabulary(min(args.draft_vocab, vocab), vocab, head.target_ids.cpu()))
    elif head is None:
        ids = corpus.draft_vocabulary(min(args.draft_vocab or DRAFT_VOCAB, vocab), vocab).to(target.device)
        head = new_head(target, ids, seed=args.seed, warm=args.warm_start, kv_heads=args.kv_heads, inner=args.inner)
    options = TrainOptions(
        passes=args.passes, batch_tokens=args.batch_tokens, lr=args.lr, frozen_head=args.frozen_head, epochs=args.epochs,
        train_tokens=args.train_tokens, minutes=args.train_minutes, seed=args.seed,
        store_hidden=args.device == "cpu" if args.store_hidden is None else args.store_hidden,
    )  # fmt: skip
    trainer = Trainer(target, head, corpus, options, state)
    trainer.run()
    save_eagle3(head, args.out / "head")
    stored = (args.out / "head" / "model.safetensors").stat().st_size
    about = card(loaded.name, corpus, trainer, f"{MODULE} {shlex.join(args.argv)}", stored)
    (args.out / "head" / CARD).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return about


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status; the last line on stdout is the card's accuracy as JSON."""
    args = build_parser().parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        about = train(args)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    except (ValueError, OSError, RuntimeError) as error:
        print(f"train_eagle3: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps({"head": str(args.out / "head"), **about["held_out"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
