"""Commands of consoles: checked, recorded, forwarded to the core, and answered once however often they come.

Order of the checks: session, repeat, rate, record, role, epoch, override, age, lease, core there. Nothing has an effect
before its line in the audit log is written.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from ppengine.gateway.audit import AuditLog, entry_of
from ppengine.gateway.command_answers import Answers
from ppengine.gateway.command_checks import refusal_of
from ppengine.gateway.command_effects import Effects, EngineAccess
from ppengine.gateway.control_lease import ControlLease
from ppengine.gateway.event_log import EventLog
from ppengine.gateway.kept_commands import (
    Kept,
    as_recorded,
    brief,
    is_end,
    repeats,
)
from ppengine.gateway.rate_limits import RateLimits
from ppengine.gateway.sessions import Session, Sessions
from ppengine.gateway.text_desk import TextDesk
from ppengine.protocol.control import Accepted, Command, Outcome, Refused, Reply
from ppengine.protocol.frames import Header
from ppengine.protocol.reports import Recalled
from ppengine.protocol.verb_table import ROWS
from ppengine.protocol.verbs import Verb

KEPT = 4096
"""Most commands whose answers are kept for repeats; those without an end stay longest."""
REPEAT_S = 10.0
"""Seconds for a console to repeat a command that its gateway recorded and did not forward."""
CORE_AWAY_S, CORE_FULL_S = 30.0, 1.0
"""Seconds for which a command waits for a core that is restarted, and for one that takes no message.

The connection to a core that ends is gone a moment before the report of its end.
"""
ENDS_MOST = 3
"""Cores to which a command is sent without an answer: it may be the reason why they end."""
_ID_MOST, _REASON_MOST = 128, 1000
ENGINE = "the engine"
"""Author of the commands that the engine gives itself."""


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
        *,
        texts_absent: bool = False,
    ) -> None:
        """`texts_absent`: the engine has no tokenizer."""
        self._epoch, self._audit, self._lease = epoch, audit, lease
        self._answer, self._engine = answer, engine
        self._answers = Answers(audit, events, sessions, answer, engine)
        self._effects = Effects(self._answers, engine, lease, texts_absent=texts_absent)
        self._limits = RateLimits()
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    @property
    def texts(self) -> TextDesk:
        """The desk for commands with texts."""
        return self._effects.texts

    @property
    def stopping(self) -> bool:
        """Whether a Stop is under way."""
        return self._answers.stopping

    def handle(self, client: bytes, head: Header, command: Command, session: Session | None, size: int = 0) -> None:
        """Check one command of `size` bytes and execute it; every path answers."""
        if session is None:
            self._answer(client, Refused(id=command.id, code="DENIED", text="say Hello before the first command"))
            return
        # The author is a label that a key's owner gives to the session; the audit log has the key's name beside it.
        command.by = session.user
        command.reason = command.reason[:_REASON_MOST]
        command.principal, command.role = session.principal.name, session.role
        command.arrived = time.monotonic()
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
        kept = Kept(entry_of(command, session.program, session.principal.name), brief(command), client)
        kept.take(command)
        # An engine that cannot record must still be stopped: the reserve of the log is for that.
        why = self._answers.write(kept.entry, reserved=kept.ends_engine)
        if why and not kept.ends_engine:
            text = f"{why}; no command is carried out, except for stop"
            self._answer(client, Refused(id=command.id, code="FAILED", text=text))
            return
        refusal = refusal_of(head, command, session, self._epoch, self._lease)
        if refusal is not None:
            # Not kept: it would push out others' answers, and the same checks give the same answer.
            self._answers.give(kept, refusal)
            return
        self._kept[command.id] = kept
        while len(self._kept) > KEPT:
            ended = (one for one, known in self._kept.items() if known.over)
            del self._kept[next(ended, next(iter(self._kept)))]
        self._effects.begin(kept)

    def issue(self, identity: str, verb: Verb, reason: str) -> None:
        """Carry out a verb of the engine itself, recorded as a command is; a known id changes nothing."""
        if identity in self._kept:
            return
        command = Command(id=identity, epoch=self._epoch, verb=verb, by=ENGINE, reason=reason)
        kept = Kept(entry_of(command, "gateway", ""), brief(command))
        kept.take(command)
        if not self._answers.write(kept.entry, reserved=False):
            self._kept[identity] = kept
            self._effects.begin(kept)

    def on_reply(self, reply: Reply, *, core: bool = True) -> bool:
        """Pass an answer on, of the core or of the fault desk; return False if it belongs to no open command."""
        kept = self._kept.get(reply.id)
        if kept is None or kept.over:
            return False
        # The core makes the event of an end itself: it also ends operations that came by other ways.
        self._answers.give(kept, reply, reported=core and isinstance(reply, Outcome))
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
            self._answers.stopping = self.stopping or (kept.ends_engine and not kept.over)
            if kept.row.runs == "core":
                continue
            if kept.recorded is not None:
                kept.replies.append(kept.recorded)
            else:
                text = "the gateway was replaced meanwhile; how far it came is not known"
                self._answers.give(kept, Outcome(id=identity, op=f"g-{identity[-8:]}", state="failed", text=text))
        return [identity for identity, kept in self._kept.items() if kept.row.runs == "core"]

    def recalled(self, answer: Recalled, now: float) -> None:
        """Enter the core's answers to adopted commands: ends that were not recorded are recorded now."""
        for reply in answer.replies:
            kept = self._kept.get(reply.id)
            if kept is not None and reply not in kept.replies and not any(map(is_end, kept.replies)):
                self._answers.give(kept, reply, reported=isinstance(reply, Outcome))
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
                self._answers.give(kept, kept.recorded)
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
                self._effects.forward(kept)

    def _again(self, kept: Kept) -> None:
        """Send a command again: the core does not know it."""
        if kept.waits_since is not None or self.texts.has(kept):
            return
        if any(isinstance(reply, Accepted) for reply in kept.replies):
            op = next(reply.op for reply in kept.replies if isinstance(reply, Accepted))
            text = "the engine core was restarted; how far it came is not known"
            self._answers.give(kept, Outcome(id=kept.entry.id, op=op, state="failed", text=text))
            return
        kept.ends += 1
        if kept.ends >= ENDS_MOST:
            text = f"the engine core ended {kept.ends} times before it answered; it is not tried again"
            self._answers.give(kept, Refused(id=kept.entry.id, code="FAILED", text=text))
        else:
            self._effects.forward(kept)

    def expire(self, now: float) -> None:
        """Refuse commands that waited for too long: for their consoles to repeat them, or for a core."""
        for identity, kept in list(self._kept.items()):
            away = self._engine.core_away()
            if kept.waits_since is not None and now - kept.waits_since > (CORE_AWAY_S if away else CORE_FULL_S):
                kept.waits_since = None
                text = away or self._engine.core_missing() or "the engine core takes no more commands now"
                self._answers.give(kept, Refused(id=identity, code="NO_CORE", text=text))
            if kept.forget_at is not None and now > kept.forget_at:
                kept.forget_at = None
                text = "the gateway was replaced before the command reached the core: it had no effect"
                self._answers.give(kept, Refused(id=identity, code="FAILED", text=text))

    def core_lost(self, why: str) -> None:
        """End every open command, because the core will not."""
        for kept in [kept for kept in self._kept.values() if not kept.over]:
            op = next((reply.op for reply in kept.replies if isinstance(reply, Accepted)), None)
            if kept.ends_engine:
                # The last answer of the core is lost with its connection; its exit is the requested end.
                op = op or kept.op
                self._answers.give(kept, Outcome(id=kept.entry.id, op=op, state="applied", text=why))
            elif op is None:
                self._answers.give(kept, Refused(id=kept.entry.id, code="NO_CORE", text=why))
            else:
                text = f"{why}; how far it came is not known"
                self._answers.give(kept, Outcome(id=kept.entry.id, op=op, state="failed", text=text))

    # --- repeats --------------------------------------------------------------------------------------------

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
            known.forget_at = None
            known.take(command)
            refusal = refusal_of(head, command, session, self._epoch, self._lease)
            if refusal is None:
                self._effects.begin(known)
            else:
                self._answers.give(known, refusal)
