"""Commands of consoles: checked, recorded, forwarded to the core, and answered once however often they come.

Order of the checks: session and role, repeat, epoch, age, record, core there. Nothing has an effect before its line
in the audit log is written.
"""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

from ppengine.common.procfs import read_stat, tracer
from ppengine.gateway.audit import AuditError, AuditLog
from ppengine.gateway.events import EventLog
from ppengine.gateway.roles import may_command
from ppengine.gateway.sessions import Session, Sessions
from ppengine.protocol.control import Accepted, Command, Deferred, ErrorCode, Outcome, Refused
from ppengine.protocol.discovery import process_start
from ppengine.protocol.frames import Header
from ppengine.protocol.verbs import Continue, Many, Submit, Verb, label_of, name_of, row_of

Reply = Accepted | Deferred | Outcome | Refused
KEPT = 4096
"""Commands whose answers are kept for repeats."""
_ID_MOST, _REASON_MOST = 128, 1000


class EngineAccess(Protocol):
    """The parts of the gateway that the desk needs."""

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

    def note_stop(self, command: Command) -> None:
        """Note in the engine's kept files who stops it."""


class Kept(msgspec.Struct):
    """One command and its answers so far."""

    command: Command
    client: bytes
    program: str
    replies: list[Reply] = []
    over: bool = False

    @property
    def ends_engine(self) -> bool:
        """Whether it is a command to end the engine, and no dry run."""
        return row_of(self.command.verb).ends_engine and not self.command.dry_run


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
        kept: int = KEPT,
    ) -> None:
        self._epoch, self._audit, self._events, self._sessions = epoch, audit, events, sessions
        self._answer, self._engine = answer, engine
        self._most = kept
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self.stopping = False
        """A Stop is under way."""

    def handle(self, client: bytes, head: Header, command: Command, session: Session | None) -> None:
        """Check one command and execute it; every path answers."""
        if session is None:
            self._answer(client, Refused(id=command.id, code="DENIED", text="say Hello before the first command"))
            return
        # The author is the session's user; with keys it will be the key's owner.
        command.by = session.user
        command.reason = command.reason[:_REASON_MOST]
        if not 0 < len(command.id) <= _ID_MOST:
            text = f"a command's id has {len(command.id)} characters; it must be 1 to {_ID_MOST}"
            self._answer(client, Refused(id=command.id[:_ID_MOST], code="INVALID", text=text))
            return
        known = self._kept.get(command.id)
        if known is not None:
            self._repeat(client, command, known)
            return
        kept = Kept(command, client, session.program)
        if not self._record(kept, "received"):
            text = "the audit log cannot be written; no command is carried out"
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

    def core_lost(self, why: str) -> None:
        """End every open command, because the core will not."""
        for kept in [kept for kept in self._kept.values() if not kept.over]:
            op = next((reply.op for reply in kept.replies if isinstance(reply, Accepted)), None)
            if kept.ends_engine:
                # The last answer of the core is lost with its connection; its exit is the requested end.
                op = op or f"g-{kept.command.id[-8:]}"
                self._reply(kept, Outcome(id=kept.command.id, op=op, state="applied", text=why))
            elif op is None:
                self._reply(kept, _refused(kept.command, "NO_CORE", why))
            else:
                text = f"{why}; how far it came is not known"
                self._reply(kept, Outcome(id=kept.command.id, op=op, state="failed", text=text))

    # --- checks ---------------------------------------------------------------------------------------------

    def _check(self, head: Header, command: Command, session: Session) -> Refused | None:
        if not may_command(session.role):
            text = f"{session.user} is attached read-only: {name_of(command.verb)} is refused"
            return _refused(command, "DENIED", text)
        if command.epoch != self._epoch:
            text = f"the engine was restarted: epoch {command.epoch[:64]!r} has ended, {self._epoch} runs"
            return _refused(command, "STALE_EPOCH", text)
        # Consoles are on this host and share its clocks. The wall clock continues during a suspend, the monotonic one
        # does not jump: the older of both ages counts.
        age_ms = max(time.time() - head.wall, (time.monotonic_ns() - head.mono_ns) / 1e9) * 1e3
        if not age_ms <= command.ttl_ms:
            return _refused(command, "EXPIRED", f"sent {age_ms:.0f} ms ago, it was good for {command.ttl_ms} ms")
        return None

    def _repeat(self, client: bytes, command: Command, known: Kept) -> None:
        """Give a repeat the answers of the first, and send it the rest."""
        if known.command.by != command.by or known.command.verb != command.verb:
            text = f"id {command.id} belongs to another command; every command needs an id of its own"
            self._answer(client, Refused(id=command.id, code="CONFLICT", text=text))
            return
        known.client = client
        for reply in known.replies:
            self._answer(client, reply)

    # --- effects --------------------------------------------------------------------------------------------

    def _begin(self, kept: Kept) -> None:
        command = kept.command
        row = row_of(command.verb)
        if row.runs == "faults":
            for reply in self._engine.fault(command):
                self._reply(kept, reply)
            return
        if row.runs == "gateway":
            _HERE[type(command.verb)](self, kept)
            return
        missing = self._engine.core_missing()
        self.stopping = self.stopping or kept.ends_engine
        if missing and row.ends_engine:
            self._stop_without_core(kept, missing)
        elif missing or not self._engine.forward(command):
            self._reply(kept, _refused(command, "NO_CORE", missing or "the engine core takes no more commands now"))

    def _continue(self, kept: Kept) -> None:
        """Send SIGCONT, without the core: it may be stuck."""
        command, op = kept.command, f"g-{kept.command.id[-8:]}"
        assert isinstance(command.verb, Continue)
        stage = command.verb.stage
        process = self._engine.stage_process(stage)
        if process is None or process_start(process[0]) != process[1]:
            self._reply(kept, _refused(command, "NOT_FOUND", f"no process of stage {stage} runs"))
            return
        plan = [_continue_plan(stage, process[0])]
        if command.dry_run:
            self._reply(kept, Outcome(id=command.id, op=op, state="planned", text=plan[0], plan=plan))
            return
        self._reply(kept, Accepted(id=command.id, op=op, plan=plan))
        try:
            os.kill(process[0], signal.SIGCONT)
        except OSError as error:
            text = f"SIGCONT to pid {process[0]}: {error.strerror}"
            self._reply(kept, Outcome(id=command.id, op=op, state="failed", text=text))
            return
        text = f"sent SIGCONT to stage {stage} (pid {process[0]})"
        self._reply(kept, Outcome(id=command.id, op=op, state="applied", text=text))

    def _stop_without_core(self, kept: Kept, missing: str) -> None:
        command, op, pid = kept.command, f"g-{kept.command.id[-8:]}", self._engine.supervisor_pid()
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
        kept.over = isinstance(reply, Outcome | Refused)
        # The effect has happened: a log that cannot be written must not hide it from the console.
        self._record(kept, _outcome_name(reply), reply)
        self._answer(kept.client, reply)
        if kept.ends_engine and (isinstance(reply, Accepted) or getattr(reply, "state", "") == "applied"):
            self._engine.note_stop(kept.command)
        if kept.over and row_of(kept.command.verb).ends_engine and getattr(reply, "state", "") != "applied":
            self.stopping = False
        self._note_request(kept, reply)
        # One event reports the end of a command. Acceptance is an event only if the end comes later.
        if told or kept.command.dry_run or isinstance(reply, Accepted):
            return
        if isinstance(reply, Deferred) and not waited:
            for earlier in kept.replies[:-1]:
                self._tell(kept.command, earlier)
        self._tell(kept.command, reply)

    def _note_request(self, kept: Kept, reply: Reply) -> None:
        verb, request = kept.command.verb, getattr(reply, "request", None)
        session = self._sessions.get(kept.client)
        if session is None or not request or not isinstance(verb, Submit) or not verb.abort_on_detach:
            return
        if request not in session.requests:
            session.requests.append(request)

    def _record(self, kept: Kept, outcome: str, reply: Reply | None = None) -> bool:
        try:
            self._audit.write(
                kept.command,
                outcome,
                text=reply_text(reply) if reply else "",
                code=reply.code if isinstance(reply, Refused) else "",
                op="" if reply is None or isinstance(reply, Refused) else reply.op,
                client=kept.program,
            )
        except AuditError as error:
            self._events.say("audit.failed", str(error))
            return False
        return True

    def _tell(self, command: Command, reply: Reply) -> None:
        detail, reason = reply_text(reply), f" ({command.reason})" if command.reason else ""
        self._events.say(
            f"op.{_outcome_name(reply)}",
            f"{brief(command)}{': ' if detail else ''}{detail}{reason}",
            by=command.by,
            op=None if isinstance(reply, Refused) else reply.op,
            request=getattr(reply, "request", None) or getattr(command.verb, "request", None),
            stage=getattr(command.verb, "stage", None),
            step=reply.step if isinstance(reply, Outcome) else None,
        )


_HERE: dict[type[Verb], Callable[[CommandDesk, Kept], None]] = {Continue: CommandDesk._continue}
"""Handlers of the verbs that the gateway executes itself."""


def brief(command: Command) -> str:
    """Return `set-memory 0.6`: the verb and its short arguments, no prompt."""
    row = row_of(command.verb)
    if row.target == "submission":
        return row.name
    if isinstance(command.verb, Many):
        return f"{label_of(command.verb)} {len(command.verb.verbs)} requests"
    values = msgspec.structs.astuple(command.verb)
    words = [value for value in values if value is not None and not isinstance(value, bool)]
    return " ".join([row.name, *(f"{word:g}" if isinstance(word, float) else str(word) for word in words)])


def reply_text(reply: Reply) -> str:
    """Return the one line of a reply."""
    if isinstance(reply, Accepted):
        return "; ".join(reply.plan)
    return f"{reply.code}: {reply.text}" if isinstance(reply, Refused) else reply.text


def _outcome_name(reply: Reply) -> str:
    if isinstance(reply, Outcome):
        return reply.state
    return "accepted" if isinstance(reply, Accepted) else "deferred" if isinstance(reply, Deferred) else "refused"


def _continue_plan(stage: int, pid: int) -> str:
    """Return the effect of SIGCONT on the process `pid` of a stage, which may be none."""
    stat = read_stat(pid)
    state = stat.state if stat is not None else ""
    if state == "t":
        return f"{tracer(pid) or 'a tracer'} holds stage {stage}: SIGCONT changes nothing until it lets go"
    if state != "T":
        return f"stage {stage} is not stopped: SIGCONT changes nothing"
    return f"send SIGCONT to pid {pid} of stage {stage}"


def _refused(command: Command, code: ErrorCode, text: str) -> Refused:
    return Refused(id=command.id, code=code, text=text)
