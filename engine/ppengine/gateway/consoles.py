"""Reads and checks the messages of consoles on `control` and `bulk`, and forwards them to the desks."""

from __future__ import annotations

import time
from collections.abc import Callable

from ppengine.common.config import EngineConfig
from ppengine.gateway import envelope
from ppengine.gateway.audit import AuditLog
from ppengine.gateway.bulk import BulkDesk
from ppengine.gateway.collector import Collector
from ppengine.gateway.commands import CommandDesk
from ppengine.gateway.engine_access import EngineLink
from ppengine.gateway.events import EventLog
from ppengine.gateway.gateway_sockets import Sockets, drain
from ppengine.gateway.publisher import Answerer
from ppengine.gateway.questions import LocalAnswers
from ppengine.gateway.sessions import Session, Sessions
from ppengine.protocol import frames
from ppengine.protocol.control import (
    Command,
    Failed,
    Fetch,
    Goodbye,
    Hello,
    Inspect,
    Ping,
    Pong,
    Refused,
    Replay,
    ToBulk,
    ToGateway,
    Welcome,
)


class Consoles:
    """The sessions of all consoles, and the desks for their commands and questions."""

    def __init__(
        self,
        config: EngineConfig,
        audit: AuditLog,
        sockets: Sockets,
        events: EventLog,
        collector: Collector,
        engine: EngineLink,
        local: LocalAnswers,
        pulse: Callable[[], tuple[int, float | None]],
    ) -> None:
        """`local` answers questions here; `pulse` returns the newest step and the age of the core's report in ms."""
        self._config, self._sockets, self._events, self._collector = config, sockets, events, collector
        self._engine, self._pulse = engine, pulse
        self._answer_control = Answerer(sockets.control, config.id, config.epoch)
        self._answer_bulk = Answerer(sockets.bulk, config.id, config.epoch)
        self._to_gateway, self._to_bulk = frames.Codec(ToGateway), frames.Codec(ToBulk)
        self.sessions = Sessions(self._on_session)
        self.commands = CommandDesk(config.epoch, audit, events, self.sessions, self._answer_control, engine)
        self.bulk = BulkDesk(
            events,
            local.answer,
            self._answer_bulk,
            engine.ask_core,
            engine.ask_agent,
            engine.list_faults,
            engine.core_away,
        )

    def on_control(self) -> None:
        """Take the waiting messages of `control`."""
        for client, *parts in drain(self._sockets.control):
            try:
                head, body = envelope.open_message(parts)
                message = self._to_gateway.decode(body)
            except frames.ProtocolError as error:
                self._collector.unreadable += 1
                refusal = envelope.refusal(parts, error)
                if refusal is not None:
                    self._answer_control(client, refusal)
                continue
            now = time.monotonic()
            if isinstance(message, Hello):
                self._on_hello(client, message, now)
            elif isinstance(message, Ping):
                known = self.sessions.ping(client, now)
                step, age = self._pulse()
                pong = Pong(nonce=message.nonce, step=step, core_age_ms=age, known=known)
                self._answer_control(client, pong)
            elif isinstance(message, Goodbye):
                self.sessions.goodbye(client, now)
            elif isinstance(message, Command):
                self.commands.handle(client, head, message, self.sessions.get(client))

    def on_bulk(self) -> None:
        """Take the waiting messages of `bulk`."""
        for client, *parts in drain(self._sockets.bulk):
            try:
                _, body = envelope.open_message(parts)
                question = self._to_bulk.decode(body)
            except frames.ProtocolError as error:
                self._collector.unreadable += 1
                if envelope.readable(parts):
                    self._answer_bulk(client, Failed(nonce=envelope.nonce(parts), code="PROTOCOL", text=str(error)))
                continue
            if isinstance(question, Replay | Fetch | Inspect):
                self.bulk.handle(client, question)

    def _on_hello(self, client: bytes, hello: Hello, now: float) -> None:
        if hello.proto_min > frames.PROTOCOL or hello.proto_max < frames.PROTOCOL_MIN:
            spoken = f"{frames.PROTOCOL_MIN} to {frames.PROTOCOL}"
            text = f"protocol {hello.proto_min} to {hello.proto_max} is not spoken here: {spoken} are"
            self._answer_control(client, Refused(id="", code="UNSUPPORTED", text=text))
            return
        session = self.sessions.hello(client, hello, now)
        welcome = Welcome(
            proto=min(frames.PROTOCOL, hello.proto_max),
            role=session.role,
            engine=self._config.id,
            name=self._config.name,
            epoch=self._config.epoch,
            event_seq=self._events.newest,
            event_oldest=self._events.oldest,
            max_frame_bytes=frames.MAX_FRAME_BYTES,
            capabilities=["snap", "snap1", "event", "replay", "fetch", "inspect"],
        )
        self._answer_control(client, welcome)

    def _on_session(self, change: str, session: Session) -> None:
        mode = " read-only" if session.role == "viewer" else ""
        self._events.say(f"console.{change}", f"{change}{mode} ({session.program})", by=session.user)
        if change == "detached" and session.requests:
            self._engine.abort(session.requests)
            text = f"aborted with the console of {session.user}: {', '.join(session.requests)}"
            self._events.say("request.abort_on_detach", text, by=session.user)
