"""Commands whose end is not known yet."""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from ppengine.protocol.control import Accepted, Command, Outcome, Refused, Reply
from ppengine.protocol.snapshot import Event, Snapshot

from ppconsole.link.source import LinkLost, Progress

_ENDS = {"op.applied": "applied", "op.done": "applied", "op.failed": "failed", "op.superseded": "superseded"}


REPEAT_S = 10.0
"""Seconds after its sending in which a command without an answer waits for a link."""


@dataclass
class Pending:
    """One command and its future answer. `orphaned`: its connection is gone, its engine is not."""

    command: Command
    sent: float
    """Time of the first sending."""
    answer: asyncio.Future[Outcome | Refused]
    on_progress: Progress | None = None
    accepted: Accepted | None = None
    orphaned: bool = False
    lost: str = ""
    """Why its connection is gone."""
    on_wire: bool = False
    """Whether the engine may have it."""


class Commands:
    """All pending commands of a link, by command id.

    An accepted command whose connection breaks is looked for in events and snapshots of the same epoch. One that was
    not accepted is sent again under its id, and the engine answers it as the first. After `REPEAT_S` it is unknown.
    """

    def __init__(self) -> None:
        self._pending: dict[str, Pending] = {}

    def add(self, command: Command, on_progress: Progress | None) -> Pending:
        """Enter a command before it is sent."""
        pending = Pending(command, time.monotonic(), asyncio.get_running_loop().create_future(), on_progress)
        self._pending[command.id] = pending
        return pending

    def drop(self, command_id: str) -> None:
        """Forget a command that ended or has no waiter."""
        pending = self._pending.pop(command_id, None)
        if pending is not None:
            forsake(pending.answer)

    def take(self, message: Reply) -> None:
        """Deliver an answer to its command; drop answers to unknown commands."""
        pending = self._pending.get(message.id)
        if pending is None or pending.answer.done():
            return
        if isinstance(message, Outcome | Refused):
            pending.answer.set_result(message)
            return
        if isinstance(message, Accepted):
            pending.accepted = message
        if pending.on_progress is not None:
            pending.on_progress(message)

    def connection_lost(self, text: str) -> None:
        """Keep the commands as orphans, except those that have waited too long for a link."""
        for pending in self._pending.values():
            pending.orphaned, pending.lost = True, pending.lost or text
            if pending.accepted is None and time.monotonic() - pending.sent > REPEAT_S:
                _end_unknown(pending, f"unknown outcome: the link broke before the engine answered ({pending.lost})")

    def attached(self, epoch: str) -> list[Command]:
        """Return the commands to send again; end orphans of another epoch, whose engine is gone with the answer."""
        again = []
        for pending in self._pending.values():
            if pending.command.epoch != epoch:
                _end_unknown(pending, "unknown outcome: the engine restarted before it answered")
            elif pending.orphaned and pending.accepted is None and not pending.answer.done():
                pending.orphaned, pending.on_wire = False, True
                left_ms = pending.command.ttl_ms - int((time.monotonic() - pending.sent) * 1e3)
                again.append(replace(pending.command, ttl_ms=max(1, left_ms)))
        return again

    def over(self, text: str) -> None:
        """End every command: no engine is left to answer."""
        for pending in self._pending.values():
            _end_unknown(pending, f"unknown outcome: {text}")

    def events_gone(self) -> None:
        """End orphans whose answer may have been among events that are gone."""
        for pending in self._pending.values():
            if pending.orphaned:
                _end_unknown(pending, "unknown outcome: its event has left the engine's ring")

    def see_event(self, event: Event) -> None:
        """Settle an orphan that this event ends."""
        state = _ENDS.get(event.kind)
        if state is not None and event.op is not None:
            self._settle(event.op, state, event.text, event.step, event.request)

    def see_snapshot(self, snapshot: Snapshot) -> None:
        """Settle orphans that the snapshot shows as ended."""
        for operation in snapshot.operations:
            if operation.state in ("applied", "failed", "superseded"):
                self._settle(operation.id, operation.state, operation.progress, None)

    def _settle(self, op: str, state: str, text: str, step: int | None, request: str | None = None) -> None:
        for command_id, pending in self._pending.items():
            accepted = pending.accepted
            if pending.orphaned and accepted is not None and accepted.op == op and not pending.answer.done():
                pending.answer.set_result(
                    Outcome(
                        id=command_id,
                        op=op,
                        state=state,  # type: ignore[arg-type]
                        text=text,
                        step=step,
                        request=accepted.request or request,
                        revision=accepted.revision,
                    )
                )


def command_id() -> str:
    """Return a new UUIDv7: unique, and sorted by time."""
    value = (time.time_ns() // 1_000_000) << 80 | 0x7 << 76 | secrets.randbits(12) << 64
    return str(uuid.UUID(int=value | 0b10 << 62 | secrets.randbits(62)))


def forsake(answer: asyncio.Future[Any]) -> None:
    """Await `answer` no more. An end that came while the question was still being sent is no oversight.

    Else the loop would print it, once more and out of place: "Future exception was never retrieved".
    """
    if not answer.cancel() and not answer.cancelled():
        answer.exception()


def _end_unknown(pending: Pending, text: str) -> None:
    if not pending.answer.done():
        text = text if pending.on_wire else f"not sent, nothing happened: {text.removeprefix('unknown outcome: ')}"
        pending.answer.set_exception(LinkLost(text, sent=pending.on_wire))
