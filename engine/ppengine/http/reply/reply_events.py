"""Events of a reply: reasoning, content and tool calls, in the order of the output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

Kind = Literal["reasoning", "text", "call", "arguments", "end", "broken", "cut"]


class Event(NamedTuple):
    """A part of a reply. The sources of all events are the output, without a gap."""

    kind: Kind
    """`call` begins a tool call; `end` ends it. `broken` ends one whose arguments cannot be read.

    `cut` ends one in which a constrained output has ended.
    """
    text: str
    """The characters that a client gets: of `call` the function's name, of `arguments` a part of the JSON."""
    source: str
    """The characters of the output that it was made of."""


def joined(events: Iterable[Event]) -> list[Event]:
    """Return the same events without empty ones, and those side by side of one kind as one."""
    kept: list[Event] = []
    for event in events:
        last = kept[-1] if kept else None
        if last is not None and last.kind == event.kind and event.kind in ("reasoning", "text", "arguments"):
            kept[-1] = Event(event.kind, last.text + event.text, last.source + event.source)
        elif event.kind in ("call", "end", "broken", "cut") or event.text or event.source:
            kept.append(event)
    return kept


def settled(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events of a whole reply; a broken call comes back as the text that it was."""
    call: list[Event] = []
    for event in events:
        if event.kind == "call" or call:
            call.append(event)
        else:
            yield event
        if event.kind in ("end", "cut"):
            yield from call
            call = []
        elif event.kind == "broken":
            source = "".join(one.source for one in call)
            yield Event("text", source, source)
            call = []
