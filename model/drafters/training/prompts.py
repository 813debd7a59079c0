"""The stream of prompts that training data is written from: templates, files of the user's own, and what the target asks."""

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from stepgraph.model.drafters.training.generate import write_texts
from stepgraph.model.drafters.training.templates import template_prompts
from stepgraph.model.tokenizer import Tokenizer
from stepgraph.model.transformer import Transformer

ASKED_TOKENS = 64  # of a prompt that the target writes; longer ones seldom end, and wander
ASKED_TEMPERATURE = 0.8


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


def asked_by(target: Transformer, tokenizer: Tokenizer | None, count: int, rows: int, seed: int) -> Iterator[str]:
    """`count` different prompts, as the target thinks its users write: what it writes itself where a chat template has the
    user speak (Xu et al. 2024, "Magpie"). A target that was not trained on its users' words writes none that end.

    Raises:
        ValueError: the target has no chat template that starts a user's words, or fewer positions than such prompts take, or
            one in twenty of what it writes would do at most.
    """
    start = _before_the_user(tokenizer)
    if not start:
        raise ValueError("the target has no chat template that starts a user's words; allowed is --self-prompts 0")
    longest, ends, written = len(start) + ASKED_TOKENS, set(tokenizer.eos_token_ids), set()
    if longest > target.max_positions:
        raise ValueError(f"--self-prompts takes {longest} tokens for a prompt; allowed is --max-len {longest} or more")
    options = {"rows": rows, "max_len": longest, "eos": ends, "temperatures": (ASKED_TEMPERATURE,)}
    for tries, text in enumerate(write_texts(target, itertools.repeat(start), seed=seed, **options), 1):
        prompt = tokenizer.decode(text.tokens[text.prompt_len : -1]).strip()
        if text.tokens[-1] in ends and prompt and prompt not in written:
            written.add(prompt)
            yield prompt
        if len(written) == count:
            return
        if tries > 20 * (len(written) + rows):
            raise ValueError(f"the target wrote {len(written)} prompts in {tries} tries; --self-prompts 0 is allowed")


def _before_the_user(tokenizer: Tokenizer | None) -> list[int]:
    """What a chat template puts before the words of its user; empty where it does not."""
    if tokenizer is None or tokenizer.chat_template is None:
        return []
    mark = "\x00"
    before, found, _ = tokenizer.apply_chat_template([{"role": "user", "content": mark}]).partition(mark)
    return tokenizer.encode(before, add_special_tokens=False) if found else []
