"""Tool calls in the forms that models were trained to write."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from ppengine.http.reply.growing_parser import GrowingParser, MalformedError, Step

Functions = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of each function that was offered, by name."""
_ARGUMENTS = ("arguments", "parameters")


class ToolParser(GrowingParser):
    """Finds calls of the functions that were offered; a call of any other is text."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that begin a call anywhere. One that is a special token of the tokenizer must be in the text."""
    special: ClassVar[tuple[str, ...]] = ()
    """Further special tokens that must be in the text."""
    id_form: ClassVar[tuple[str, int]] = ("call_", 24)
    """Beginning of the ids of calls, and number of the characters behind it."""

    def __init__(self, functions: Functions) -> None:
        super().__init__()
        self._functions, self._names = functions, tuple(functions)

    def parse(self) -> Step[None]:
        """Parse text and calls."""
        while (yield from self.text_until(self.markers)):
            yield from self.attempt()

    def attempt(self) -> Step[None]:
        """Parse the calls behind a marker; give a malformed one back."""
        try:
            yield from self.calls()
        except MalformedError:
            self.break_off()

    @abstractmethod
    def calls(self) -> Step[None]:
        """Parse the calls behind a marker. Raises MalformedError."""

    def object_call(self) -> Step[None]:
        """Parse `{"name": NAME, "arguments": {...}}` but for its end; the keys in any order. Raises MalformedError."""
        yield from self.expect("{")
        name = arguments = None
        yield from self.space()
        more = not (yield from self.accept("}"))
        while more:
            key = yield from self.string()
            yield from self.space()
            yield from self.expect(":")
            yield from self.space()
            if key == "name" and name is None:
                name = yield from self.string()
                if name not in self._functions:
                    raise MalformedError
                if arguments is not None:
                    self.begin_call(name)
                    self.give("arguments", arguments)
            elif key in _ARGUMENTS and arguments is None:
                if name is not None:
                    self.begin_call(name)
                begin = self._at
                yield from self.arguments(streams=name is not None)
                arguments = self._text[begin : self._at]
            elif key == "name" or key in _ARGUMENTS:
                raise MalformedError
            else:
                yield from self.value()
            yield from self.space()
            more = not (yield from self.accept("}"))
            if more:
                yield from self.expect(",")
                yield from self.space()
        if name is None:
            raise MalformedError
        if arguments is None:
            self.begin_call(name)
            self.give("arguments", "{}")

    def object_calls(self, separator: str) -> Step[None]:
        """Parse `object_call` and its end, and further ones behind `separator`. Raises MalformedError."""
        more = True
        while more:
            yield from self.space()
            yield from self.object_call()
            self.end_call()
            yield from self.space()
            more = yield from self.accept(separator)

    def named_call(self, name: str) -> Step[None]:
        """Parse the arguments of a call of `name`, and end it. Raises MalformedError."""
        if (yield from self.char()) != "{":
            raise MalformedError
        self.begin_call(name)
        yield from self.arguments()
        self.end_call()

    def arguments(self, *, streams: bool = True) -> Step[None]:
        """Parse the object of the arguments; `streams`: give it out as it comes. Raises MalformedError."""
        if (yield from self.char()) != "{":
            raise MalformedError
        self._streams = streams
        yield from self.value()
        self.end_stream()


class HermesParser(ToolParser):
    """`<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`: Qwen, Hermes."""

    markers = ("<tool_call>",)

    def calls(self) -> Step[None]:
        """Parse one call. Raises MalformedError."""
        yield from self.space()
        yield from self.object_call()
        yield from self.space()
        yield from self.accept("</tool_call>")
        self.end_call()


class Llama3Parser(ToolParser):
    """`{"name": NAME, "parameters": {...}}`, several by semicolon: Llama 3. It begins the text, or follows a token."""

    markers = ("<|python_tag|>",)

    def parse(self) -> Step[None]:
        """Parse calls at the beginning of the text, then as others."""
        yield from self.space()
        if (yield from self.char()) == "{":
            yield from self.attempt()
        yield from super().parse()

    def calls(self) -> Step[None]:
        """Parse calls. Raises MalformedError."""
        yield from self.object_calls(";")


class MistralParser(ToolParser):
    """`[TOOL_CALLS]` before a list of objects, or before each `NAME[ARGS]{...}`: Mistral, by age of the tokenizer."""

    markers = ("[TOOL_CALLS]",)
    special = ("[ARGS]", "[CALL_ID]")
    id_form = ("", 9)

    def calls(self) -> Step[None]:
        """Parse a list of calls, or one call. Raises MalformedError."""
        yield from self.space()
        if not (yield from self.accept("[")):
            name = yield from self.one_of(self._names)
            if (yield from self.accept("[CALL_ID]")):
                while (yield from self.char()).isalnum():
                    self._at += 1
            yield from self.accept("[ARGS]")
            yield from self.space()
            yield from self.named_call(name)
            return
        yield from self.object_calls(",")
        yield from self.accept("]")
        self.give("text", "")


class Glm4Parser(ToolParser):
    """The name of a function, a line feed and `{...}`, at the beginning of the text: GLM-4."""

    def parse(self) -> Step[None]:
        """Parse calls, then text."""
        yield from self.attempt()
        yield from super().parse()

    def calls(self) -> Step[None]:
        """Parse calls up to the first character that is none. Raises MalformedError."""
        yield from self.space()
        while (yield from self.char()):
            name = yield from self.one_of(self._names)
            yield from self.expect("\n")
            yield from self.space()
            yield from self.named_call(name)
            yield from self.space()
