"""The answers to commands by id: a command that comes twice is carried out once, also behind two gateways."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from ppengine.protocol.control import Deferred, Outcome, Refused, Reply

KEPT = 4096
"""Most commands whose answers are kept; those without an end stay longest."""


class Answers:
    """Sends answers and keeps them: of each command its acceptance, newest progress and end."""

    def __init__(
        self, reply: Callable[[bytes, msgspec.Struct], None], kept: int = KEPT,
        note: Callable[[Reply], None] = lambda reply: None,
    ) -> None:  # fmt: skip
        """`note` takes every answer, for the journal."""
        self._reply, self._most, self._note = reply, kept, note
        self._kept: OrderedDict[str, list[Reply]] = OrderedDict()

    def __call__(self, client: bytes, reply: Reply) -> None:
        """Answer a command."""
        self.keep(reply)
        self._note(reply)
        self._reply(client, reply)

    def keep(self, reply: Reply) -> None:
        """Keep an answer for repeats."""
        known = self._kept.setdefault(reply.id, [])
        if known and isinstance(known[-1], Deferred):
            known.pop()
        known.append(reply)
        if len(self._kept) > self._most:
            ended = (one for one, replies in self._kept.items() if isinstance(replies[-1], Outcome | Refused))
            del self._kept[next(ended, next(iter(self._kept)))]

    def kept(self) -> list[Reply]:
        """Return all answers that are kept, the oldest command first."""
        return [reply for replies in self._kept.values() for reply in replies]

    def repeat(self, client: bytes, command: str) -> bool:
        """Give a command that has come before its answers; return False for another one."""
        for reply in self._kept.get(command, ()):
            self._reply(client, reply)
        return command in self._kept

    def of(self, commands: Iterable[str]) -> tuple[list[Reply], list[str]]:
        """Return the answers to `commands`, and those of them that have none."""
        known: list[Reply] = []
        unknown = []
        for command in commands:
            known += self._kept.get(command, ())
            if command not in self._kept:
                unknown.append(command)
        return known, unknown
