"""The reader of one reply: its reasoning, its content and its tool calls."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass

from ppengine.http.reply.reasoning_splitter import ReasoningSplitter
from ppengine.http.reply.reply_events import Event, joined
from ppengine.http.reply.reply_form import ReplyForm
from ppengine.http.reply.tool_parsers import Functions, ToolParser

_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, kw_only=True)
class ReplyFactory:
    """Makes the readers of the replies to one request."""

    form: ReplyForm
    inside: bool
    """Whether the prompt ends with the beginning of reasoning."""
    functions: Functions
    """The functions that were offered."""
    parallel: bool
    """Whether several calls are wanted; otherwise those after the first are left out."""
    certain: type[ToolParser] | None = None
    """The parser of an output that is constrained to calls; then there is no reasoning."""

    @property
    def plain(self) -> bool:
        """Whether all of a reply is content."""
        return self.certain is None and self.form.reasoning is None and not self._calls

    def reader(self) -> ReplyReader:
        """Return a reader of one reply."""
        if self.certain is not None:
            return ReplyReader(None, self.certain(self.functions), parallel=self.parallel)
        parser = self.form.tool_parser(self.functions) if self.form.tool_parser and self._calls else None
        splitter = ReasoningSplitter(self.form.reasoning, inside=self.inside) if self.form.reasoning else None
        return ReplyReader(splitter, parser, parallel=self.parallel)

    def call_id(self) -> str:
        """Return the id of a new call, in the form that the model's template takes."""
        prefix, size = ToolParser.id_form if self.form.tool_parser is None else self.form.tool_parser.id_form
        return prefix + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(size))

    @property
    def _calls(self) -> bool:
        return self.form.tool_parser is not None and bool(self.functions)


class ReplyReader:
    """Feed it with the text of one choice. `parallel` False: calls after the first are left out."""

    def __init__(self, splitter: ReasoningSplitter | None, parser: ToolParser | None, *, parallel: bool) -> None:
        self._splitter, self._parser, self._parallel = splitter, parser, parallel
        self.calls = 0
        """Number of complete calls."""
        self.reasoning_tokens = 0
        self._reasons = splitter is not None
        """Whether no content has come yet."""
        self._left_out = self._cut = False

    def push(self, text: str, tokens: int = 0, *, last: bool = False) -> list[Event]:
        """Return the events that `text` completes; `last`: nothing follows."""
        events = [Event("text", text, text)] if self._splitter is None else self._splitter.push(text)
        if self._splitter is not None and last:
            events += self._splitter.end()
        self._reasons = self._reasons and all(event.kind == "reasoning" for event in events)
        self.reasoning_tokens += tokens * self._reasons
        events = self._parsed(events)
        if self._parser is not None and last:
            events += self._counted(self._parser.end())
        return joined(events)

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason of the reply, by that of its text. Clients parse all calls of `tool_calls`."""
        return "tool_calls" if reason == "stop" and self.calls and not self._cut else reason

    def _parsed(self, events: list[Event]) -> list[Event]:
        if self._parser is None:
            return events
        made: list[Event] = []
        for event in events:
            made += self._counted(self._parser.push(event.text)) if event.kind == "text" else [event]
        return made

    def _counted(self, events: list[Event]) -> list[Event]:
        kept = []
        for event in events:
            if event.kind == "call":
                self._left_out = bool(self.calls) and not self._parallel
            if not self._left_out or event.kind == "text":
                kept.append(event)
            self.calls += event.kind == "end" and not self._left_out
            self._cut = self._cut or (event.kind == "cut" and not self._left_out)
        return kept
