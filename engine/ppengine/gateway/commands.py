"""Commands of consoles: checked, recorded, forwarded to the core, and answered once however often they come.

Order of the checks: session, repeat, rate, record, role, epoch, override, age, lease, core there. Nothing has an effect
before its line in the audit log is written.
"""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec

from ppengine.gateway.audit import ENDS, AuditError, AuditLog, Entry, entry_of
from ppengine.gateway.continue_stage import continue_stage
from ppengine.gateway.control_lease import ControlLease
from ppengine.gateway.events import EventLog
from ppengine.gateway.kept_commands import (
    Kept,
    as_recorded,
    brief,
    is_end,
    line_of,
    outcome_name,
    repeats,
    reply_text,
)
from ppengine.gateway.rate_limits import RateLimits
from ppengine.gateway.sessions import Session, Sessions
from ppengine.protocol.control import Accepted, Command, Deferred, ErrorCode, Outcome, Refused, Reply
from ppengine.protocol.frames import Header
from ppengine.protocol.reports import Recalled
from ppengine.protocol.verb_table import ROWS, Role, covers
from ppengine.protocol.verbs import Continue, Many, Verb, name_of, row_of

KEPT = 4096
"""Commands whose answers are kept for repeats."""
REPEAT_S = 10.0
"""Seconds for a console to repeat a command that its gateway recorded and did not forward."""
CORE_AWAY_S, CORE_FULL_S = 30.0, 1.0
"""Seconds for which a command waits for a core that is restarted, and for one that takes no message.

The connection to a core that ends is gone a moment before the report of its end.
"""
ENDS_MOST = 3
"""Cores to which a command is sent without an answer: it may be the reason why they end."""
_ID_MOST, _REASON_MOST = 128, 1000


class EngineAccess(Protocol):
    """The parts of the gateway that the desk needs."""

    def core_away(self) -> str:
        """Return how the core ended that is being restarted; empty if none is."""

    def core_missing(self) -> str:
        """Return why the core cannot take a command; empty: it can."""

    def forward(self, command: Command) -> bool:
        """Send to the core; return whether it was taken."""

    def fault(self, command: Command) -> list[Accepted | Outcome | Refused]:
        """Begin a `Fault` or `ClearFaults`; return the answers so far."""

    def stage_process(self, stage: int) -> tuple[int, int] | None:
        """Return (pid, start time) of a stage."""

    def supervisor_pid(self) -> int | None:
        """Return the pid of the supervisor, which is this process's parent; None if that is not so."""

    def note_stop(self, by: str, reason: str) -> None:
        """Note in the engine's kept files who stops it."""


class CommandDesk:
    """Takes commands of consoles and answers of the core."""

    def __init__(
        self,
        epoch: str,
        audit: AuditLog,
        events: EventLog,
        sessions: Sessions,
        answer: Callable[[bytes, msgspec.Struct], None],
        engine: EngineAccess,
        lease: ControlLease,
        kept: int = KEPT,
    ) -> None:
        self._epoch, self._audit, self._events, self._sessions = epoch, audit, events, sessions
        self._answer, self._engine, self._lease = answer, engine, lease
        self._most = kept
        self._limits = RateLimits()
        self._unwritten = ""
        """Why the newest line could not be written; empty: it was."""
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self.stopping = False
        """A Stop is under way."""

    def handle(self, client: bytes, head: Header, command: Command, session: Session | None, size: int = 0) -> None:
        """Check one command of `size` bytes and execute it; every path answers."""
        if session is None:
            self._answer(client, Refused(id=command.id, code="DENIED", text="say Hello before the first command"))
            return
        # The author is a label that a key's owner gives to the session; the audit log has the key's name beside it.
        command.by = session.user
        command.reason = command.reason[:_REASON_MOST]
        command.principal, command.role = session.principal.name, session.role
        if not 0 < len(command.id) <= _ID_MOST:
            text = f"a command's id has {len(command.id)} characters; it must be 1 to {_ID_MOST}"
            self._answer(client, Refused(id=command.id[:_ID_MOST], code="INVALID", text=text))
            return
        known = self._kept.get(command.id)
        if known is not None:
            self._repeat(client, head, command, known, session)
            return
        # Repeats come first: a command that was carried out must not be reported as refused.
        wait_s = self._limits.take(session.principal.key, size, time.monotonic())
        if wait_s:
            text = (
                f"key {session.principal.name} sends too much; it has no effect, and another may go in {wait_s:.2g} s"
            )
            self._answer(client, Refused(id=command.id, code="RATE_LIMITED", text=text))
            return
        command.console = session.console
        kept = Kept(entry_of(command, session.program, session.principal.name), brief(command), client, command)
        # An engine that cannot record must still be stopped: the reserve of the log is for that.
        why = self._write(kept.entry, reserved=kept.ends_engine)
        if why and not kept.ends_engine:
            text = f"{why}; no command is carried out, except for stop"
            self._answer(client, Refused(id=command.id, code="FAILED", text=text))
            return
        refusal = self._check(head, command, session)
        if refusal is not None:
            # Not kept: it would push out others' answers, and the same checks give the same answer.
            self._reply(kept, refusal)
            return
        self._kept[command.id] = kept
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)
        self._begin(kept)

    def on_reply(self, reply: Reply, *, core: bool = True) -> bool:
        """Pass an answer on, of the core or of the fault desk; return False if it belongs to no open command."""
        kept = self._kept.get(reply.id)
        if kept is None or kept.over:
            return False
        # The core makes the event of an end itself: it also ends operations that came by other ways.
        self._reply(kept, reply, told=core and isinstance(reply, Outcome))
        return True

    # --- a predecessor --------------------------------------------------------------------------------------

    def adopt(self) -> list[str]:
        """Take over the commands that the audit log of a predecessor has; return the ids that the core may know."""
        for identity, known in self._audit.recorded().items():
            if known.entry.verb not in ROWS:
                continue
            kept = Kept(known.entry, known.entry.verb, audited={line.outcome for line in known.outcomes})
            self._kept[identity] = kept
            if known.end is not None:
                kept.over, kept.recorded = True, as_recorded(known.end)
            self.stopping = self.stopping or (kept.ends_engine and not kept.over)
            if kept.row.runs == "core":
                continue
            if kept.recorded is not None:
                kept.replies.append(kept.recorded)
            else:
                text = "the gateway was replaced meanwhile; how far it came is not known"
                self._reply(kept, Outcome(id=identity, op=f"g-{identity[-8:]}", state="failed", text=text))
        return [identity for identity, kept in self._kept.items() if kept.row.runs == "core"]

    def recalled(self, answer: Recalled, now: float) -> None:
        """Enter the core's answers to adopted commands: ends that were not recorded are recorded now."""
        for reply in answer.replies:
            kept = self._kept.get(reply.id)
            if kept is not None and reply not in kept.replies and not any(map(is_end, kept.replies)):
                self._reply(kept, reply, told=isinstance(reply, Outcome))
        for identity in answer.unknown:
            kept = self._kept.get(identity)
            if kept is None:
                continue
            if kept.command is not None:
                if not kept.over:
                    self._again(kept)
                continue
            if not kept.over:
                kept.forget_at = now if kept.client else now + REPEAT_S
            elif kept.recorded is not None and not kept.replies:
                self._reply(kept, kept.recorded)
        for kept in self._kept.values():
            kept.audited.clear()

    # --- another core ---------------------------------------------------------------------------------------

    def open(self) -> list[str]:
        """Return the ids of the commands for the core that have no end."""
        return [identity for identity, kept in self._kept.items() if kept.row.runs == "core" and not kept.over]

    def core_back(self) -> None:
        """Send the commands that have waited for a core."""
        for kept in list(self._kept.values()):
            if kept.waits_since is not None:
                kept.waits_since = None
                self._forward(kept)

    def _again(self, kept: Kept) -> None:
        """Send a command again: the core does not know it."""
        if kept.waits_since is not None:
            return
        if any(isinstance(reply, Accepted) for reply in kept.replies):
            op = next(reply.op for reply in kept.replies if isinstance(reply, Accepted))
            text = "the engine core was restarted; how far it came is not known"
            self._reply(kept, Outcome(id=kept.entry.id, op=op, state="failed", text=text))
            return
        kept.ends += 1
        if kept.ends >= ENDS_MOST:
            text = f"the engine core ended {kept.ends} times before it answered; it is not tried again"
            self._reply(kept, Refused(id=kept.entry.id, code="FAILED", text=text))
        else:
            self._forward(kept)

    def expire(self, now: float) -> None:
        """Refuse commands that waited for too long: for their consoles to repeat them, or for a core."""
        for identity, kept in list(self._kept.items()):
            away = self._engine.core_away()
            if kept.waits_since is not None and now - kept.waits_since > (CORE_AWAY_S if away else CORE_FULL_S):
                kept.waits_since = None
                text = away or self._engine.core_missing() or "the engine core takes no more commands now"
                self._reply(kept, Refused(id=identity, code="NO_CORE", text=text))
            if kept.forget_at is not None and now > kept.forget_at:
                kept.forget_at = None
                text = "the gateway was replaced before the command reached the core: it had no effect"
                self._reply(kept, Refused(id=identity, code="FAILED", text=text))

    def core_lost(self, why: str) -> None:
        """End every open command, because the core will not."""
        for kept in [kept for kept in self._kept.values() if not kept.over]:
            op = next((reply.op for reply in kept.replies if isinstance(reply, Accepted)), None)
            if kept.ends_engine:
                # The last answer of the core is lost with its connection; its exit is the requested end.
                op = op or f"g-{kept.entry.id[-8:]}"
                self._reply(kept, Outcome(id=kept.entry.id, op=op, state="applied", text=why))
            elif op is None:
                self._reply(kept, Refused(id=kept.entry.id, code="NO_CORE", text=why))
            else:
                text = f"{why}; how far it came is not known"
                self._reply(kept, Outcome(id=kept.entry.id, op=op, state="failed", text=text))

    # --- checks ---------------------------------------------------------------------------------------------

    def _check(self, head: Header, command: Command, session: Session) -> Refused | None:
        if not covers(session.role, least := _least_role(command.verb)):
            read_only, name = f"{session.user} is attached read-only", name_of(command.verb)
            key = f"key {session.principal.name} is {session.role}, {name} needs {least}"
            return _refused(command, "DENIED", f"{read_only if session.read_only else key}: {name} is refused")
        if command.epoch != self._epoch:
            text = f"the engine was restarted: epoch {command.epoch[:64]!r} has ended, {self._epoch} runs"
            return _refused(command, "STALE_EPOCH", text)
        if command.override and not command.reason.strip():
            return _refused(command, "INVALID", "an override needs a reason: --reason TEXT")
        age_ms = session.age_s(head) * 1e3
        if not age_ms <= command.ttl_ms:
            return _refused(command, "EXPIRED", f"sent {age_ms:.0f} ms ago, it was good for {command.ttl_ms} ms")
        leased = self._lease.obstacle(command)
        return _refused(command, "LEASED", leased) if leased else None

    def _repeat(self, client: bytes, head: Header, command: Command, known: Kept, session: Session) -> None:
        """Give a repeat the answers of the first, and send it the rest.

        A command that a predecessor recorded, and that never reached the core, is carried out now.
        """
        if not repeats(known, command, session.principal.name):
            text = f"id {command.id} belongs to another command; every command needs an id of its own"
            self._answer(client, Refused(id=command.id, code="CONFLICT", text=text))
            return
        known.client = client
        for reply in known.replies:
            self._answer(client, reply)
        if known.forget_at is not None:
            command.console = session.console
            known.forget_at, known.command = None, command
            refusal = self._check(head, command, session)
            if refusal is None:
                self._begin(known)
            else:
                self._reply(known, refusal)

    # --- effects --------------------------------------------------------------------------------------------

    def _begin(self, kept: Kept) -> None:
        command, row = kept.command, kept.row
        assert command is not None, "only a console's command is begun"
        if row.runs == "faults":
            for reply in self._engine.fault(command):
                self._reply(kept, reply)
            return
        if row.runs == "gateway":
            for answer in self._own(command, f"g-{kept.entry.id[-8:]}"):
                self._reply(kept, answer)
            return
        self.stopping = self.stopping or kept.ends_engine
        self._forward(kept)

    def _own(self, command: Command, op: str) -> Iterator[Reply]:
        """Carry out a verb of the gateway itself."""
        if isinstance(command.verb, Continue):
            stage = command.verb.stage
            return continue_stage(command, op, stage, self._engine.stage_process(stage))
        return self._lease.handle(command, op)

    def _forward(self, kept: Kept) -> None:
        """Send a command to the core; while that is restarted, it waits."""
        command, away = kept.command, self._engine.core_away()
        assert command is not None, "only a console's command is sent"
        missing = away or self._engine.core_missing()
        if missing and kept.row.ends_engine:
            self._stop_without_core(kept, missing)
        elif missing and not away:
            self._reply(kept, _refused(command, "NO_CORE", missing))
        elif away or not self._engine.forward(command):
            kept.waits_since = time.monotonic()

    def _stop_without_core(self, kept: Kept, missing: str) -> None:
        command, op, pid = kept.command, f"g-{kept.entry.id[-8:]}", self._engine.supervisor_pid()
        assert command is not None, "only a console's command is begun"
        if pid is None:
            self._reply(kept, _refused(command, "NO_CORE", f"{missing}; the supervisor is not known here"))
            return
        plan = [f"send SIGTERM to the supervisor, pid {pid} ({missing})"]
        if command.dry_run:
            self._reply(kept, Outcome(id=command.id, op=op, state="planned", text=plan[0], plan=plan))
            return
        self._reply(kept, Accepted(id=command.id, op=op, plan=plan))
        os.kill(pid, signal.SIGTERM)
        text = f"sent SIGTERM to the supervisor to stop the engine ({missing})"
        self._reply(kept, Outcome(id=command.id, op=op, state="applied", text=text))

    # --- answers --------------------------------------------------------------------------------------------

    def _reply(self, kept: Kept, reply: Reply, *, told: bool = False) -> None:
        waited = any(isinstance(earlier, Deferred) for earlier in kept.replies)
        kept.replies.append(reply)
        kept.over = kept.over or is_end(reply)
        # The effect has happened: a log that cannot be written must not hide it from the console.
        known = outcome_name(reply) in kept.audited or (kept.over and bool(kept.audited & ENDS))
        if not known:
            self._write(line_of(kept.entry, reply), reserved=kept.ends_engine or not isinstance(reply, Refused))
        if kept.client:
            self._answer(kept.client, reply)
        if kept.ends_engine and (isinstance(reply, Accepted) or getattr(reply, "state", "") == "applied"):
            self._engine.note_stop(kept.entry.by, kept.entry.reason)
        if kept.over and kept.row.ends_engine and getattr(reply, "state", "") != "applied":
            self.stopping = False
        self._note_request(kept, reply)
        # One event reports the end of a command. Acceptance is an event only if the end comes later.
        if told or known or kept.entry.dry_run or isinstance(reply, Accepted):
            return
        if isinstance(reply, Deferred) and not waited:
            for earlier in kept.replies[:-1]:
                self._tell(kept, earlier)
        self._tell(kept, reply)

    def _note_request(self, kept: Kept, reply: Reply) -> None:
        request, session = getattr(reply, "request", None), self._sessions.get(kept.client)
        attended = kept.entry.verb == "submit" and kept.entry.args.get("abort_on_detach")
        if session is None or not request or not attended:
            return
        if request not in session.requests:
            session.requests.append(request)

    def _write(self, entry: Entry, *, reserved: bool) -> str:
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

    def _tell(self, kept: Kept, reply: Reply) -> None:
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


def _least_role(verb: Verb) -> Role:
    """Return the least role for a verb; several at once need as much as one."""
    return row_of(verb.verbs[0]).role if isinstance(verb, Many) and verb.verbs else row_of(verb).role


def _refused(command: Command, code: ErrorCode, text: str) -> Refused:
    return Refused(id=command.id, code=code, text=text)
