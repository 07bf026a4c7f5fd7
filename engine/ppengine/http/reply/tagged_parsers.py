"""Tool calls whose arguments are text between tags."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import ClassVar

import msgspec

from ppengine.http.reply.growing_parser import MalformedError, Step
from ppengine.http.reply.tool_parsers import ToolParser


class TaggedParser(ToolParser):
    """Calls whose arguments are text between tags, each with its key."""

    markers = ("<tool_call>",)
    key_tags: ClassVar[tuple[str, str]]
    """Texts around a key."""
    value_ends: ClassVar[tuple[str, ...]]
    """Texts that end a value; the last one always comes."""

    @abstractmethod
    def value_begin(self) -> Step[None]:
        """Parse the text between a key and its value. Raises MalformedError."""

    def tagged_arguments(self, name: str) -> Step[None]:
        """Begin a call and parse its arguments. Raises MalformedError."""
        properties = self._functions[name].get("properties")
        before = "{"
        while (yield from self.accept(self.key_tags[0])):
            key = (yield from self.until(self.key_tags[1])).strip()
            yield from self.value_begin()
            if not self._call_open:
                self.begin_call(name)
            self.give("arguments", f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            schema = properties.get(key) if isinstance(properties, dict) else None
            if isinstance(schema, dict) and schema.get("type") == "string":
                yield from self._plain()
            else:
                yield from self._json()
            yield from self.space()
        if not self._call_open:
            self.begin_call(name)
        self.give("arguments", "{}" if before == "{" else "}")

    def _json(self) -> Step[None]:
        """Parse a value of JSON, or else plain text."""
        text = (yield from self.until(self.value_ends[-1])).strip()
        try:
            msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            text = json.dumps(text, ensure_ascii=False)
        self.give("arguments", text)

    def _plain(self) -> Step[None]:
        """Parse plain text, and give it out as it comes."""
        self.give("arguments", '"')
        while True:
            for end in self.value_ends:
                if (yield from self.accept(end)):
                    self.give("arguments", '"')
                    return
            if not (yield from self.char()):
                raise MalformedError
            begins = [at for end in self.value_ends if (at := self._text.find(end[0], self._at + 1)) >= 0]
            self._at = min(begins, default=len(self._text))
            self.give("arguments", json.dumps(self._text[self._given : self._at], ensure_ascii=False)[1:-1])


class Glm45Parser(TaggedParser):
    """`<tool_call>NAME`, `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` for each argument: GLM-4.5 and later."""

    key_tags = ("<arg_key>", "</arg_key>")
    value_ends = ("</arg_value>",)

    def value_begin(self) -> Step[None]:
        """See `TaggedParser`."""
        yield from self.space()
        yield from self.expect("<arg_value>")

    def calls(self) -> Step[None]:
        """Parse one call. Raises MalformedError."""
        yield from self.space()
        name = yield from self.one_of(self._names)
        yield from self.space()
        yield from self.tagged_arguments(name)
        yield from self.expect("</tool_call>")
        self.end_call()


class Qwen3CoderParser(TaggedParser):
    """`<tool_call><function=NAME>`, `<parameter=KEY>VALUE</parameter>` for each argument: Qwen3-Coder, Qwen3.5."""

    key_tags = ("<parameter=", ">")
    value_ends = ("\n</parameter>", "</parameter>")

    def value_begin(self) -> Step[None]:
        """See `TaggedParser`."""
        yield from self.accept("\n")

    def calls(self) -> Step[None]:
        """Parse one call. Raises MalformedError."""
        yield from self.space()
        yield from self.expect("<function=")
        name = yield from self.one_of(self._names)
        yield from self.expect(">")
        yield from self.space()
        yield from self.tagged_arguments(name)
        yield from self.expect("</function>")
        yield from self.space()
        yield from self.accept("</tool_call>")
        self.end_call()
