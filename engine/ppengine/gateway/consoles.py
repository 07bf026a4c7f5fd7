"""Reads and checks the messages of consoles on `control` and `bulk`, and forwards them to the desks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ppengine.common.config import EngineConfig
from ppengine.gateway import envelope
from ppengine.gateway.access import AccessControl
from ppengine.gateway.audit import AuditLog
from ppengine.gateway.bulk import BulkDesk
from ppengine.gateway.commands import CommandDesk
from ppengine.gateway.control_lease import ControlLease
from ppengine.gateway.engine_access import EngineLink
from ppengine.gateway.event_log import EventLog
from ppengine.gateway.gateway_sockets import Received, Sockets, received
from ppengine.gateway.keyring import Principal
from ppengine.gateway.past_desk import LIST_BYTES, PastDesk
from ppengine.gateway.publisher import Answerer
from ppengine.gateway.questions import LocalAnswers
from ppengine.gateway.rate_limits import QUESTIONS_MOST, QUESTIONS_S, RateLimits
from ppengine.gateway.sessions import Session, Sessions
from ppengine.protocol import frames
from ppengine.protocol.allowed_keys import OWNER
from ppengine.protocol.control import (
    Command,
    ErrorCode,
    Failed,
    Fetch,
    Goodbye,
    Hello,
    Inspect,
    Ping,
    Pong,
    Refused,
    ToBulk,
    ToGateway,
    Welcome,
)
from ppengine.protocol.kept_files import engine_folder
from ppengine.protocol.past_files import CAPABILITY, PART_BYTES, ListPast, ReadPast
from ppengine.protocol.verb_table import Role, covers

QUESTION_ROLES: dict[str, Role] = {"stacks": "operator"}
"""Least roles of inspections that are more than reading: taking stacks stops a process for a moment."""
_LEASED_SINCE = 2
"""First protocol version with the error code LEASED; an unknown one would end the link of its console."""
_REVOKED = "the key of this console is not allowed any more"


class Consoles:
    """The sessions of all consoles, and the desks for their commands and questions."""

    def __init__(
        self,
        config: EngineConfig,
        audit: AuditLog,
        sockets: Sockets,
        access: AccessControl,
        events: EventLog,
        engine: EngineLink,
        local: LocalAnswers,
        pulse: Callable[[], tuple[int, float | None]],
    ) -> None:
        """`local` answers questions here; `pulse` returns the newest step and the age of the core's report in ms."""
        self._config, self._sockets, self._events = config, sockets, events
        self._access, self._engine, self._pulse = access, engine, pulse
        self._to_control = Answerer(sockets.control, config.id, config.epoch)
        self._answer_bulk = Answerer(sockets.bulk, config.id, config.epoch)
        self._to_gateway, self._to_bulk = frames.Codec(ToGateway), frames.Codec(ToBulk)
        self._questions = RateLimits(QUESTIONS_S, QUESTIONS_MOST)
        # Apart: who copies an hour must still be answered elsewhere.
        self._past_limits = RateLimits()
        self._past = PastDesk(engine_folder(config.id), config.id, config.name)
        self.sessions = Sessions(self._on_session)
        self.lease = ControlLease(Path(config.run_dir) / "lease.json", events.say, access.may_change)
        self.commands = CommandDesk(
            config.epoch, audit, events, self.sessions, self._answer_control, engine, self.lease,
            texts_absent=not config.text_roles,
        )  # fmt: skip
        self.bulk = BulkDesk(
            events,
            local.answer,
            self._answer_bulk,
            engine.ask_core,
            engine.ask_agent,
            engine.list_faults,
            engine.core_awaited,
            engine.ask_texts if config.text_roles else None,
        )

    def _answer_control(self, client: bytes, message: msgspec.Struct) -> None:
        """Answer on `control`, in the protocol version of the console."""
        if isinstance(message, Refused) and message.code == "LEASED":
            session = self.sessions.get(client)
            if session is not None and session.proto < _LEASED_SINCE:
                message = msgspec.structs.replace(message, code="DENIED")
        self._to_control(client, message)

    def on_control(self) -> None:
        """Take the waiting messages of `control`."""
        for message in received(self._sockets.control):
            try:
                head, body = envelope.open_message(message.parts)
                content = self._to_gateway.decode(body)
            except frames.ProtocolError as error:
                refusal = envelope.refusal(message.parts, error)
                if refusal is not None:
                    self._answer_control(message.client, refusal)
                continue
            principal = self._access.principal(message.key)
            if principal is not None:
                self._handle(message, head, content, principal)
            elif isinstance(content, Hello | Command):
                identity = content.id[:128] if isinstance(content, Command) else ""
                self._answer_control(message.client, Refused(id=identity, code="DENIED", text=_REVOKED))

    def _handle(self, message: Received, head: frames.Header, content: object, principal: Principal) -> None:
        """Handle one message of a key that is allowed now."""
        client, now, session = message.client, time.monotonic(), self._session(message, head, principal)
        if isinstance(content, Hello):
            self._on_hello(message, head, content, principal)
        elif isinstance(content, Ping):
            known = session is not None and self.sessions.ping(client, now)
            step, age = self._pulse()
            role = None if session is None else session.role
            self._answer_control(client, Pong(nonce=content.nonce, step=step, core_age_ms=age, known=known, role=role))
        elif isinstance(content, Goodbye) and session is not None:
            self.sessions.goodbye(client, now)
        elif isinstance(content, Command):
            self.commands.handle(client, head, content, session, sum(map(len, message.parts)))

    def _session(self, message: Received, head: frames.Header, principal: Principal) -> Session | None:
        """Return the session of a message. A routing id is no identity: another key's session is not this one's."""
        session = self.sessions.get(message.client)
        if session is None or session.principal.key != principal.key:
            return None
        session.principal = principal
        session.age_s(head)
        return session

    def on_bulk(self) -> None:
        """Take the waiting messages of `bulk`."""
        for client, parts, key, _ in received(self._sockets.bulk):
            try:
                _, body = envelope.open_message(parts)
                question = self._to_bulk.decode(body)
            except frames.ProtocolError as error:
                if envelope.readable(parts):
                    self._answer_bulk(client, Failed(nonce=envelope.nonce(parts), code="PROTOCOL", text=str(error)))
                continue
            if not isinstance(question, ToBulk):
                continue
            code, why = self._refusal(key, question)
            if why:
                self._answer_bulk(client, Failed(nonce=question.nonce, code=code, text=why))
            elif isinstance(question, ListPast | ReadPast):
                self._answer_bulk(client, self._past.answer(question))
            else:
                self.bulk.handle(client, question, key)

    def drop_revoked(self) -> None:
        """Drop the open questions of keys that are not allowed any more."""
        self.bulk.drop_revoked(lambda key: self._access.principal(key) is not None)

    def _refusal(self, key: str, question: ToBulk) -> tuple[ErrorCode, str]:
        """Return code and reason for refusing a question; an empty reason: it is not refused."""
        principal = self._access.principal(key)
        if principal is None:
            return "DENIED", _REVOKED
        least = QUESTION_ROLES.get(question.what, "viewer") if isinstance(question, Inspect) else "viewer"
        if not covers(principal.role, least):
            return "DENIED", f"key {principal.name} is {principal.role}; this question needs {least}"
        wait_s, now = 0.0, time.monotonic()
        if isinstance(question, ListPast | ReadPast):
            size = LIST_BYTES if isinstance(question, ListPast) else min(max(0, question.size), PART_BYTES)
            wait_s = self._past_limits.take(key, size, now)
        elif not isinstance(question, Fetch):
            wait_s = self._questions.take(key, 0, now)
        return "RATE_LIMITED", f"key {principal.name} asks too much; the next in {wait_s:.2g} s" if wait_s else ""

    def _on_hello(self, message: Received, head: frames.Header, hello: Hello, principal: Principal) -> None:
        if hello.proto_min > frames.PROTOCOL or hello.proto_max < frames.PROTOCOL_MIN:
            spoken = f"{frames.PROTOCOL_MIN} to {frames.PROTOCOL}"
            text = f"protocol {hello.proto_min} to {hello.proto_max} is not spoken here: {spoken} are"
            self._answer_control(message.client, Refused(id="", code="UNSUPPORTED", text=text))
            return
        session = self.sessions.hello(message.client, hello, time.monotonic(), principal, message.address)
        session.age_s(head)
        welcome = Welcome(
            proto=session.proto,
            role=session.role,
            engine=self._config.id,
            name=self._config.name,
            epoch=self._config.epoch,
            event_seq=self._events.newest,
            event_oldest=self._events.oldest,
            max_frame_bytes=frames.MAX_FRAME_BYTES,
            capabilities=["snap", "snap1", "event", "replay", "fetch", "inspect", CAPABILITY],
        )
        self._answer_control(message.client, welcome)

    def _on_session(self, change: str, session: Session) -> None:
        mode = " read-only" if session.role == "viewer" else ""
        key = "" if session.principal.name in ("", OWNER) else f", key {session.principal.name}"
        text = f"{change}{mode} ({session.program}{key})"
        if not session.passing:
            self._events.say(f"console.{change}", text, by=session.user)
        if change == "detached" and session.requests:
            self._engine.abort(session.requests)
            client = "client" if session.passing else "console"
            text = f"aborted with the {client} of {session.user}: {', '.join(session.requests)}"
            self._events.say("request.abort_on_detach", text, by=session.user)
