"""Parsers of text that grows: generators, which wait where the text ends so far.

A parser decides by characters alone, never by the places at which the text was cut. So any pieces give the same events.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import ClassVar, Literal, TypeVar

import msgspec

from ppengine.checkpoint.stop_text import may_begin
from ppengine.http.reply.reply_events import Event, Kind

T = TypeVar("T")
Step = Generator[None, None, T]
"""A part of a parser: it yields to wait for more text, and returns a T."""
DEPTH_MOST = 64
"""Most levels of JSON; a deeper call is malformed."""
WORD_MOST = 64
"""Most characters of a number in JSON, in text that may be no call."""
_SPACE = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.\w]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")


class MalformedError(Exception):
    """The text is not in the form of a call. The parser is at the first character that does not fit."""


class GrowingParser(ABC):
    """Feed it with `push` and, at the end of the output, `end`. Both return the events that are certain by then."""

    word_most: ClassVar[int] = WORD_MOST

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        """Place of the next character."""
        self._given = 0
        """Place up to which the text is in events."""
        self._ended = False
        self._streams = False
        """Whether characters of a call's arguments are given out as they come."""
        self._call_open = False
        self._calls = 0
        self._events: list[Event] = []
        self._run = self.parse()

    def push(self, text: str) -> list[Event]:
        """Return the events that `text` completes."""
        self._text += text
        return self._go_on()

    def end(self) -> list[Event]:
        """Return the events of the rest."""
        self._ended = True
        return self._go_on()

    @abstractmethod
    def parse(self) -> Step[None]:
        """Parse the whole text."""

    def _go_on(self) -> list[Event]:
        next(self._run, None)
        events, self._events = self._events, []
        return events

    def _wait(self) -> Step[None]:
        """Wait for more text."""
        if self._streams:
            self.give("arguments")
        yield

    # --- characters ------------------------------------------------------------------------------------------------

    def char(self) -> Step[str]:
        """Return the next character without taking it; empty at the end of the text."""
        while self._at == len(self._text) and not self._ended:
            yield from self._wait()
        return self._text[self._at : self._at + 1]

    def space(self) -> Step[None]:
        """Take white space."""
        while (char := (yield from self.char())) and char in _SPACE:
            self._at += 1

    def accept(self, literal: str) -> Step[bool]:
        """Take `literal` if the text goes on with it; return whether it does."""
        while True:
            found = self._text[self._at : self._at + len(literal)]
            if found == literal:
                self._at += len(literal)
                return True
            if self._ended or not literal.startswith(found):
                return False
            yield from self._wait()

    def expect(self, literal: str) -> Step[None]:
        """Take `literal`. Raises MalformedError."""
        if not (yield from self.accept(literal)):
            raise MalformedError

    def until(self, literal: str) -> Step[str]:
        """Return the text before `literal`, and take both. Raises MalformedError if it does not come."""
        begin = looked = self._at
        while (found := self._text.find(literal, looked)) < 0:
            if self._ended:
                self._at = len(self._text)
                raise MalformedError
            looked = max(begin, len(self._text) - len(literal) + 1)
            yield from self._wait()
        self._at = found + len(literal)
        return self._text[begin:found]

    def one_of(self, names: Sequence[str]) -> Step[str]:
        """Take and return the longest of `names` that comes. Raises MalformedError."""
        begin = self._at
        while True:
            char = yield from self.char()
            longer = self._text[begin : self._at] + char
            if not char or not any(name.startswith(longer) for name in names):
                break
            self._at += 1
        if (name := self._text[begin : self._at]) not in names:
            raise MalformedError
        return name

    # --- JSON ------------------------------------------------------------------------------------------------------

    def value(self, depth: int = 0) -> Step[None]:
        """Take a value of JSON. Raises MalformedError."""
        char = yield from self.char()
        if char == '"':
            yield from self.string()
        elif char in ("{", "["):
            yield from self._container(char, depth)
        else:
            begin = self._at
            while (yield from self.char()) and (end := min(self._word_end(), begin + self.word_most)) > self._at:
                self._at = end
            if _SCALAR.fullmatch(self._text, begin, self._at) is None:
                raise MalformedError

    def string(self) -> Step[str]:
        """Take a string of JSON and return it. Raises MalformedError."""
        begin = self._at
        yield from self.expect('"')
        while (char := (yield from self.char())) != '"':
            if char == "\\":
                self._at += 1
                escaped = yield from self.char()
                if not escaped or escaped not in '"\\/bfnrtu':
                    raise MalformedError
                self._at += 1
                for _ in range(4 if escaped == "u" else 0):
                    digit = yield from self.char()
                    if not digit or digit not in "0123456789abcdefABCDEF":
                        raise MalformedError
                    self._at += 1
            elif not char or char < " ":
                raise MalformedError
            else:
                plain = _PLAIN.match(self._text, self._at)
                assert plain is not None, "it matches nothing, too"
                self._at = plain.end()
        self._at += 1
        if self._streams:
            return ""
        try:
            return msgspec.json.decode(self._text[begin : self._at], type=str)
        except msgspec.DecodeError:
            # Half of a surrogate pair.
            raise MalformedError from None

    def _word_end(self) -> int:
        word = _WORD.match(self._text, self._at)
        assert word is not None, "it matches nothing, too"
        return word.end()

    def _container(self, opening: str, depth: int) -> Step[None]:
        if depth == DEPTH_MOST:
            raise MalformedError
        self._at += 1
        closing = "}" if opening == "{" else "]"
        yield from self.space()
        if (yield from self.accept(closing)):
            return
        while True:
            if opening == "{":
                yield from self.string()
                yield from self.space()
                yield from self.expect(":")
                yield from self.space()
            yield from self.value(depth + 1)
            yield from self.space()
            if (yield from self.accept(closing)):
                return
            yield from self.expect(",")
            yield from self.space()

    # --- events ----------------------------------------------------------------------------------------------------

    def give(self, kind: Kind, text: str | None = None) -> None:
        """Give out an event of the text that was taken and is in none; `text`: other than its source."""
        source = self._text[self._given : self._at]
        self._given = self._at
        if source or text is not None:
            self._events.append(Event(kind, source if text is None else text, source))

    def begin_call(self, name: str) -> None:
        """Begin a call of the function `name`."""
        self._call_open = True
        self.give("call", name)

    def end_call(self) -> None:
        """End a call that is complete."""
        self._call_open = False
        self._calls += 1
        self.give("end", "")

    @property
    def at_end(self) -> bool:
        """Whether the output has ended, and all of it is taken."""
        return self._ended and self._at == len(self._text)

    def break_off(self) -> None:
        """Give back a malformed call: as text before it has begun, else as a broken one."""
        self.end_stream()
        if self._call_open:
            self._call_open = False
            self.give("broken", "")
        else:
            self.give("text")

    def cut_off(self) -> None:
        """End at the end of the output: a call that has begun is cut, and less of one is left out."""
        self.end_stream()
        self.give("cut" if self._call_open else "text", "")
        self._call_open = False

    def end_stream(self) -> None:
        """Give out the arguments that were taken, as those are that came before."""
        if self._streams:
            self._streams = False
            self.give("arguments")

    def text_until(self, markers: Sequence[str], kind: Literal["reasoning", "text"] = "text") -> Step[bool]:
        """Give out text up to the first of `markers`, and take that; return False at the end of the text.

        Nothing is given out that may begin a marker, nor white space that may be before one, which is dropped.
        """
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._at)) >= 0]
            if found:
                at, marker = min(found)
                self._give_stripped(at, kind)
                self._at = at + len(marker)
                return True
            if self._ended:
                self._at = len(self._text)
                if self._calls and not self._text[self._given :].strip(_SPACE):
                    self.give(kind, "")
                self.give(kind)
                return False
            held = may_begin(self._text, markers) if markers else 0
            end = len(self._text) - held
            self._at = self._given + len(self._text[self._given : end].rstrip(_SPACE)) if markers else end
            self.give(kind)
            self._text, self._at, self._given = self._text[self._given :], 0, 0
            yield

    def _give_stripped(self, end: int, kind: Literal["reasoning", "text"]) -> None:
        text = self._text[self._given : end].rstrip(_SPACE)
        self._at = end
        self.give(kind, text)
