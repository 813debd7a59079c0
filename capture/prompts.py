"""Prompts from files and command lines, and the token ids a model is given for them."""

import json
from dataclasses import dataclass
from pathlib import Path

from stepgraph.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptRecord:
    """One line of a prompts file; `id` is the line's number where the file has none."""

    id: str
    category: str
    prompt: str


def read_prompts(path: str | Path) -> list[PromptRecord]:
    """Read a JSON-lines file of `{"prompt", "id", "category"}` objects; only the prompt is needed. Blank lines do not count.

    Raises:
        ValueError: the file cannot be read, or a line is not such an object; names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")  # other line breaks are legal inside JSON texts
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"prompts file {str(path)!r} cannot be read: {error}") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"prompts file {path}, line {number}: not JSON ({error})") from None
        values = {"id": str(number), "category": "", **entry} if isinstance(entry, dict) else {}
        fields = [values.get(key) for key in ("id", "category", "prompt")]
        if not all(isinstance(value, str) for value in fields):
            raise ValueError(
                f'prompts file {path}, line {number}: an object with the text "prompt" is needed; "id" and "category" may be '
                "there, as texts"
            )
        records.append(PromptRecord(*fields))
    if not records:
        raise ValueError(f"prompts file {path} has no prompts")
    return records


def encode_prompt(text: str, tokenizer: Tokenizer | None, chat: bool | None = None) -> list[int]:
    """Token ids for a prompt.

    Args:
        text: what the user wrote; without a tokenizer, token ids separated by commas.
        tokenizer: the model's, or None.
        chat: render it as a user message with the chat template; None does so where there is one.

    Raises:
        ValueError: empty prompt, no chat template, or no token ids.
    """
    if not text.strip():
        raise ValueError("a prompt is empty; at least one token is needed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"a prompt holds characters that are no Unicode text: {text[:40]!r}") from None
    if tokenizer is None:
        if chat:
            raise ValueError("a chat template was asked for; the model has no tokenizer")
        try:
            return [int(part) for part in text.split(",")]
        except ValueError:
            raise ValueError(
                f"the model has no tokenizer and the prompt is {text[:40]!r}; give token ids such as 1,2,3"
            ) from None
    if chat is None:
        chat = tokenizer.chat_template is not None
    if not chat:
        return tokenizer.encode(text)
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tokenizer.encode(rendered, add_special_tokens=False)
