"""Answers to commands: kept for repeats, written to the audit log, sent to the console, and reported as events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from ppengine.gateway.audit import ENDS, AuditError, AuditLog, Entry
from ppengine.gateway.event_log import EventLog
from ppengine.gateway.kept_commands import Kept, is_end, line_of, outcome_name, reply_text
from ppengine.gateway.sessions import Sessions
from ppengine.protocol.control import Accepted, Deferred, Outcome, Refused, Reply


class EndNote(Protocol):
    """The parts of the gateway that the answers need."""

    def abort(self, requests: list[str]) -> None:
        """Abort requests whose console has left."""

    def note_stop(self, by: str, reason: str) -> None:
        """Note in the engine's kept files who stops it."""


class Answers:
    """Gives every answer its four places."""

    def __init__(
        self,
        audit: AuditLog,
        events: EventLog,
        sessions: Sessions,
        answer: Callable[[bytes, msgspec.Struct], None],
        engine: EndNote,
    ) -> None:
        self._audit, self._events, self._sessions = audit, events, sessions
        self._answer, self._engine = answer, engine
        self._unwritten = ""
        """Why the newest line could not be written; empty: it was."""
        self.stopping = False
        """A Stop is under way."""

    def give(self, kept: Kept, reply: Reply, *, reported: bool = False) -> None:
        """Give an answer. `reported`: its event has been made already."""
        self._enter(kept, reply, reported)
        if kept.over:
            kept.end()

    def _enter(self, kept: Kept, reply: Reply, reported: bool) -> None:
        waited = any(isinstance(earlier, Deferred) for earlier in kept.replies)
        kept.replies.append(reply)
        kept.over = kept.over or is_end(reply)
        # The effect has happened: a log that cannot be written must not hide it from the console.
        known = outcome_name(reply) in kept.audited or (kept.over and bool(kept.audited & ENDS))
        if not known:
            self.write(line_of(kept.entry, reply), reserved=kept.ends_engine or not isinstance(reply, Refused))
        if kept.client:
            self._answer(kept.client, reply)
        if kept.ends_engine and (isinstance(reply, Accepted) or getattr(reply, "state", "") == "applied"):
            self._engine.note_stop(kept.entry.by, kept.entry.reason)
        if kept.over and kept.row.ends_engine and getattr(reply, "state", "") != "applied":
            self.stopping = False
        self._note_request(kept, reply)
        # One event reports the end of a command. Acceptance is an event only if the end comes later.
        if reported or known or kept.entry.dry_run or isinstance(reply, Accepted):
            return
        if isinstance(reply, Deferred) and not waited:
            for earlier in kept.replies[:-1]:
                self._report(kept, earlier)
        self._report(kept, reply)

    def write(self, entry: Entry, *, reserved: bool) -> str:
        """Write a line; return why it could not be written, empty if it was. One event reports a row of failures."""
        try:
            self._audit.write(entry, reserved=reserved)
        except AuditError as error:
            if not self._unwritten:
                self._events.say("audit.failed", str(error))
            self._unwritten = str(error)
            return self._unwritten
        self._unwritten = ""
        return ""

    def _note_request(self, kept: Kept, reply: Reply) -> None:
        request = getattr(reply, "request", None)
        attended = kept.entry.verb == "submit" and kept.entry.args.get("abort_on_detach")
        if not request or not attended or not kept.client:
            return
        console = kept.command.console if kept.command is not None else ""
        session = self._sessions.get(kept.client) or self._sessions.of_console(console)
        if session is not None:
            if request not in session.requests:
                session.requests.append(request)
        elif isinstance(reply, Accepted):
            # Its tokens were made after its console had left.
            self._engine.abort([request])
            text = f"aborted with the console of {kept.entry.by}: {request}"
            self._events.say("request.abort_on_detach", text, by=kept.entry.by)

    def _report(self, kept: Kept, reply: Reply) -> None:
        entry = kept.entry
        why = f"override: {entry.reason}" if entry.override else entry.reason
        detail, reason = reply_text(reply), f" ({why})" if why else ""
        self._events.say(
            f"op.{outcome_name(reply)}",
            f"{kept.words}{': ' if detail else ''}{detail}{reason}",
            by=entry.by,
            op=None if isinstance(reply, Refused) else reply.op,
            request=getattr(reply, "request", None) or entry.args.get("request"),
            stage=entry.args.get("stage"),
            step=reply.step if isinstance(reply, Outcome) else None,
        )
