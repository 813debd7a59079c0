"""Text to token ids and back, chat prompts, and text that arrives a few tokens at a time."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from stepgraph.model.chat_template import render_chat
from stepgraph.model.gguf_vocabulary import tokenizer_from_gguf

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
REPLACEMENT = "\ufffd"  # what an incomplete or invalid UTF-8 sequence decodes to


class Tokenizer:
    """A checkpoint's tokenizer.

    Args:
        backend: does the work.
        special_tokens: text of each special token by role (`bos_token`, `eos_token`, …); also passed to the chat template.
        eos_token_ids: ids that end a reply, besides that of `eos_token`.
        chat_template: jinja2 source, or None for a model that has none.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | None = None,
    ):
        self.backend, self.chat_template = backend, chat_template
        self.special_tokens = dict(special_tokens or {})
        own_eos = self._id_of("eos_token")
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_ids = tuple(dict.fromkeys([*([] if own_eos is None else [own_eos]), *eos_token_ids]))

    @classmethod
    def from_hf(cls, directory: str | Path, *, eos_token_ids: Iterable[int] = ()) -> "Tokenizer":
        """From `tokenizer.json`, with special tokens and chat template from the files beside it.

        Raises:
            ValueError: `tokenizer.json` is missing or damaged, or a file beside it is.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.exists():
            raise ValueError(f"{directory} has no tokenizer.json; other tokenizer files are not read")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises nothing narrower
            raise ValueError(f"{path} is damaged: {error}") from error
        config = _read_json(directory / "tokenizer_config.json")
        given = {**_read_json(directory / "special_tokens_map.json"), **config}
        special = {role: given[role] for role in SPECIAL_TOKENS if given.get(role)}
        special = {role: token["content"] if isinstance(token, dict) else token for role, token in special.items()}
        file = directory / "chat_template.jinja"
        template = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return cls(backend, special_tokens=special, eos_token_ids=eos_token_ids, chat_template=template)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, eos_token_ids: Iterable[int] = ()) -> "Tokenizer":
        """From the metadata of a GGUF file.

        Raises:
            ValueError: the file's vocabulary is of a kind that is not supported.
        """
        backend = tokenizer_from_gguf(metadata)
        roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
        special = {role: backend.id_to_token(i) for role, i in ids.items() if i is not None}
        template = metadata.get("tokenizer.chat_template")
        return cls(backend, special_tokens=special, eos_token_ids=eos_token_ids, chat_template=template)

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows; a model's embedding may have more rows."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. `add_special_tokens` adds what the model was trained to start with, if anything; leave it
        off for the result of `apply_chat_template`, which has it already.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Prompt text of a conversation, `[{"role": "user", "content": "…"}, …]`.

        Args:
            messages: the conversation so far.
            add_generation_prompt: end with the start of the assistant's reply.
            **variables: options of this model's template, e.g. `enable_thinking`.

        Raises:
            ValueError: there is no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this model has no chat template; use its prompts raw, without chat messages")
        given = {**self.special_tokens, "add_generation_prompt": add_generation_prompt, **variables}
        return render_chat(self.chat_template, messages, given)

    def _id_of(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self.backend.token_to_id(token)


class StreamDecoder:
    """Turns token ids that arrive in pieces into text that only grows.

    A character of several bytes may be split over tokens; its tokens are held until it is complete. The pushed pieces and
    `flush()` together are the text of all ids decoded at once.
    """

    # An incomplete UTF-8 character has at most 3 bytes, hence at most 3 tokens.
    MAX_HELD = 3

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self._context: list[int] = []  # emitted already; some decoders treat the first token of a text differently
        self._pending: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """New text that `ids` complete; empty while they end inside a character."""
        self._pending.extend(ids)
        known = self.tokenizer.decode(self._context)
        for held in range(min(self.MAX_HELD + 1, len(self._pending))):
            split = len(self._pending) - held
            text = self.tokenizer.decode(self._context + self._pending[:split])
            if not text.endswith(REPLACEMENT) and len(text) > len(known):
                self._context, self._pending = self._pending[:split], self._pending[split:]
                return text[len(known) :]
        return ""

    def flush(self) -> str:
        """The rest of the text, whatever it is; the decoder then starts a new text."""
        text = self.tokenizer.decode(self._context + self._pending)[len(self.tokenizer.decode(self._context)) :]
        self._context, self._pending = [], []
        return text


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no such file."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}
