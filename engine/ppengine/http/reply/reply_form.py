"""How a model writes replies: chosen by its chat template, or by the profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ppengine.http.reply.reasoning_splitter import TAGS, Tags
from ppengine.http.reply.tagged_parsers import Glm45Parser, Qwen3CoderParser
from ppengine.http.reply.tool_parsers import Glm4Parser, HermesParser, Llama3Parser, MistralParser, ToolParser

PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "glm4": Glm4Parser,
    "glm45": Glm45Parser,
    "qwen3_coder": Qwen3CoderParser,
}
"""Parsers by the names that `http.tool_parser` takes."""


@dataclass(frozen=True, kw_only=True)
class ReplyForm:
    """How a model writes replies. Both None: all is content."""

    tool_parser: type[ToolParser] | None = None
    reasoning: Tags | None = None

    @property
    def special(self) -> Sequence[str]:
        """Texts that are read, even if they are special tokens."""
        tools = () if self.tool_parser is None else (*self.tool_parser.markers, *self.tool_parser.special)
        return (*tools, *(self.reasoning or ()))


def form_of(template: str | None, tools: str, reasoning: str) -> ReplyForm:
    """Return the form of a checkpoint's replies by its chat template, unless the profile names it.

    `tools` and `reasoning` are `http.tool_parser` and `http.reasoning`.
    """
    template = template or ""
    name = _by_template(template) if tools == "auto" else tools
    shown = next((form for form, tags in TAGS.items() if tags.begin in template), "none")
    return ReplyForm(tool_parser=PARSERS.get(name), reasoning=TAGS.get(shown if reasoning == "auto" else reasoning))


_BY_TEMPLATE = (
    ("glm45", ("<arg_key>",)),
    ("qwen3_coder", ("<function=",)),
    ("hermes", ("<tool_call>",)),
    ("llama3", ("<|python_tag|>", "Environment: ipython")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("glm4", ("<|observation|>",)),
)
"""Parsers by texts of which a chat template has one: it teaches its model the form. The first that fits is taken."""


def _by_template(template: str) -> str:
    return next((name for name, texts in _BY_TEMPLATE if any(text in template for text in texts)), "none")
