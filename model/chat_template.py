"""Chat templates: jinja2 as checkpoints expect it, sandboxed because a template comes with the checkpoint."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant wrote, for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    # jinja2's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The prompt text of a conversation.

    Args:
        template: jinja2 source.
        messages: `{"role": …, "content": …}` each.
        variables: what else the template may use, e.g. `bos_token`, `add_generation_prompt`.

    Raises:
        ValueError: the template is not valid, or it refuses these messages (say, roles that do not alternate).
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(messages=list(messages), tools=None, documents=None, **variables)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template cannot render these messages: {error}") from error
