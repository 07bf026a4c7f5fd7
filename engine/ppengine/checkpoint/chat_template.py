"""The chat template of a checkpoint: a program of its author, which runs in the process `templates` alone.

The sandbox keeps a template from attributes and functions that are not its own. Time, memory and output have no limit
here: the process has them.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from typing_extensions import override

from ppengine.checkpoint.special_tokens import special_tokens
from ppengine.checkpoint.template_source import TOOL_USE, template_source
from ppengine.common.config import ConfigError
from ppengine.common.one_line import one_line
from ppengine.protocol.chat_messages import Chat

_REASON_MOST = 280
"""Most characters of the reason in an error."""


class TooLongError(ConfigError):
    """A template whose text is longer than the prompt may be."""


class ChatTemplate:
    """Template of a checkpoint, compiled at the first chat; `tool_use` is another one for chats with tools."""

    def __init__(self, source: str, special: dict[str, str], tool_use: str | None = None) -> None:
        self._source, self._tool_use = source, tool_use
        self._special = special
        self._compiled: dict[str, Template] = {}

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate:
        """Read the template of a Hugging Face folder. Raises ConfigError in one line, also if there is none."""
        source = template_source(folder)
        if source is None:
            raise ConfigError("this model has no chat template; send the prompt as plain text")
        return cls(source, special_tokens(folder), template_source(folder, TOOL_USE))

    def render(self, chat: Chat, most: int) -> str:
        """Return the text of `chat`, ready for the assistant's answer unless it says otherwise.

        Special tokens are in the text already: encode it without others. Raises ConfigError in one line for
        any error of the template, TooLongError if the text has more than `most` characters.
        """
        try:
            return self._render(chat, most)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - a template can raise all that Python can
            raise ConfigError(f"chat template: {one_line(_reason(error), _REASON_MOST)}") from None

    def _render(self, chat: Chat, most: int) -> str:
        source = self._source if chat.tools is None or self._tool_use is None else self._tool_use
        if source not in self._compiled:
            self._compiled[source] = _environment().from_string(source)
        pieces, size = [], 0
        names = {
            **self._special, **chat.options, "messages": chat.messages, "tools": chat.tools, "documents": None,
            "add_generation_prompt": chat.add_generation_prompt,
        }  # fmt: skip
        for piece in self._compiled[source].generate(names):
            size += len(piece)
            if size > most:
                raise TooLongError(f"chat template: its text has more than {most} characters; at most {most} would fit")
            pieces.append(piece)
        text = "".join(pieces)
        text.encode()  # An escape in the template can make half a character, which no tokenizer takes.
        return text


def _reason(error: Exception) -> str:
    """Return the reason of an error. Python's own errors carry their name: some have no text."""
    match error:
        case TemplateSyntaxError():
            return f"line {error.lineno}: {error.message}"
        case TemplateError():
            return error.message or type(error).__name__
        case SyntaxError():
            return f"{type(error).__name__}: {error.msg}"
        case MemoryError():
            return "it needs more memory than its process may take"
    return f"{type(error).__name__}: {str(error)[:_REASON_MOST]}"


class _Generation(Extension):
    """The blocks `generation`, by which trainers find the assistant's text; here they are that text."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox that chat templates run in, with the helpers that they expect."""

    def refuse(message: object) -> None:
        raise TemplateError(str(message))

    def to_json(
        value: Any, indent: int | str | None = None, *, ensure_ascii: bool = False,
        separators: tuple[str, str] | None = None, sort_keys: bool = False,
    ) -> str:  # fmt: skip
        # Jinja's own escapes what HTML would take for markup. Python has options that call a function of the template,
        # which the sandbox would not see.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now
    environment.filters["tojson"] = to_json
    return environment
