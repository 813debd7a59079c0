"""The stream of prompts that training data is written from: templates, and files of the user's own."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepgraph.model.drafters.training.templates import template_prompts
from stepgraph.model.tokenizer import Tokenizer


def read_prompt_file(path: str | Path) -> list[str]:
    """Prompts of a `.jsonl` file (`{"prompt": …}` or `{"turns": [first, …]}` a line) or of a text file, one a line.

    Raises:
        ValueError: the file cannot be read, or a line of JSON has no prompt; names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts file {str(path)!r} cannot be read: {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if Path(path).suffix != ".jsonl":
            prompts.append(line.strip())
            continue
        try:
            entry = json.loads(line)
            prompt = entry["prompt"] if "prompt" in entry else entry["turns"][0]
        except (ValueError, KeyError, TypeError, IndexError):
            prompt = None
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f'prompts file {path}, line {number}: an object with a text "prompt" is needed')
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"prompts file {path} has no prompts")
    return prompts


def prompt_stream(files: Sequence[str | Path], seed: int) -> Iterator[str]:
    """Endless prompts: those of the files in shuffled order, each once, taking turns with templates; then templates alone."""
    given = [prompt for path in files for prompt in read_prompt_file(path)]
    random.Random(seed).shuffle(given)
    templates = template_prompts(seed)
    return itertools.chain(
        itertools.chain.from_iterable(zip(given, itertools.islice(templates, len(given)), strict=True)), templates
    )


def encode(text: str, tokenizer: Tokenizer | None, vocab_size: int, longest: int) -> list[int]:
    """Token ids of a prompt as the model's users send it: through the chat template where there is one, and cut to `longest`
    tokens. Without a tokenizer (a toy target) its bytes stand in, modulo the vocabulary.
    """
    if tokenizer is None:
        return [byte % vocab_size for byte in text.encode()][:longest]
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)[:longest]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tokenizer.encode(rendered, add_special_tokens=False)[:longest]
