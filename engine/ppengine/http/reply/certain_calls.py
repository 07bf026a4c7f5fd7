"""Tool calls of an output that is constrained to them: JSON alone, for any model."""

from __future__ import annotations

import sys

from typing_extensions import override

from ppengine.http.reply.growing_parser import Step
from ppengine.http.reply.tool_parsers import ToolParser


class CallListParser(ToolParser):
    """A list of `{"name": NAME, "arguments": {...}}`: calls of any functions."""

    word_most = sys.maxsize  # A grammar bounds no number.

    @override
    def parse(self) -> Step[None]:
        yield from self.attempt()
        yield from self.text_until(())

    @override
    def break_off(self) -> None:
        if self.at_end:
            self.cut_off()  # By `max_tokens` or a stop text: its grammar lets it end with a whole call alone.
        else:
            super().break_off()

    @override
    def calls(self) -> Step[None]:
        yield from self.space()
        yield from self.expect("[")
        yield from self.object_calls(",")
        yield from self.expect("]")
        self.give("text", "")


class ArgumentsParser(CallListParser):
    """The arguments of the one function that was offered."""

    @override
    def calls(self) -> Step[None]:
        yield from self.space()
        yield from self.named_call(self._names[0])
