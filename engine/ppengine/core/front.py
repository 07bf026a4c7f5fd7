"""The core's side of `front`: messages of gateway, HTTP, offline clients and supervisor, and their answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import msgspec
import zmq

from ppengine.common.sockets import NOBLOCK, readable
from ppengine.core.engine import Engine
from ppengine.core.state_waiters import StateWaiters
from ppengine.protocol.clients import HttpReport
from ppengine.protocol.control import Command, Fetch, Inspect, Refused
from ppengine.protocol.frames import Codec, ProtocolError, encode
from ppengine.protocol.gpu import DeviceRooms
from ppengine.protocol.metrics import MetricsQuery, StageFigures
from ppengine.protocol.offline import (
    AbortMany,
    AddMany,
    EndSamples,
    Follow,
    ForgetMany,
    OpenSession,
    StateQuery,
    ToFront,
)
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessReport, Recall, StartStage
from ppengine.protocol.text_messages import ReadOutput

log = logging.getLogger("ppengine.core")

FRONT_BURST, FRONT_S = 64, 0.05
"""Most messages in one turn, and most seconds for them, so that a flood cannot starve the stages."""
LATER_MOST = 1000
"""Messages that wait until a core that follows another one serves; later ones are refused."""
_WAITING = (Command, AddMany, AbortMany, EndSamples, OpenSession)
"""Messages that need the requests of the core before this one."""


class Front:
    """The socket, with the answers of a turn and the orders for the supervisor."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self._supervisor = b""
        """Routing id of the supervisor, which reports processes and starts them."""
        self._orders: list[StartStage] = []
        """Orders for the supervisor, until it is known."""
        self._answers: list[tuple[bytes, bytes]] = []
        """Answers of the present turn: they go out when the journal has it."""

    def reply(self, client: bytes, message: msgspec.Struct) -> None:
        """Keep an answer to `client` until the end of the turn."""
        if isinstance(message, Refused):
            log.info("refused: %s (%s)", message.text, message.code)
        self._answers.append((client, encode(message)))

    def start_stage(self, place: Place, generation: int) -> None:
        """Order a stage from the supervisor."""
        message = StartStage(stage=place.stage, rank=place.rank, generation=generation)
        if self._supervisor:
            self.socket.send_multipart([self._supervisor, encode(message)], NOBLOCK)
        else:
            self._orders.append(message)

    def supervisor_is(self, client: bytes) -> None:
        """Note the supervisor's routing id, and send it the orders that waited for it."""
        self._supervisor = client
        orders, self._orders = self._orders, []
        for order in orders:
            self.socket.send_multipart([client, encode(order)], NOBLOCK)

    def flush(self) -> None:
        """Send the answers of the turn."""
        answers, self._answers = self._answers, []
        for client, payload in answers:
            self.socket.send_multipart([client, payload], NOBLOCK)


class FrontDesk:
    """Gives each message on `front` to the part of the engine that handles it."""

    def __init__(self, front: Front, engine: Engine, max_model_len: int, recall: Callable[[Recall], None]) -> None:
        """`recall`: pushes everything again that a new gateway cannot know."""
        self._front, self._engine, self._recall = front, engine, recall
        self._messages = Codec(ToFront)
        self._waiters = StateWaiters(engine.health, engine.rules, engine.metrics.silent_http, max_model_len)
        self._later: list[tuple[bytes, object]] = []
        """Messages for an engine that serves, while this core follows another one and does not serve yet."""

    def drain(self) -> bool:
        """Route the messages of consoles and supervisor; return whether there was one."""
        began = time.monotonic()
        for number in range(FRONT_BURST):
            if not readable(self._front.socket) or time.monotonic() - began > FRONT_S:
                return number > 0
            client, *frames = self._front.socket.recv_multipart(NOBLOCK)
            try:
                self._on_message(client, self._messages.decode(frames[-1]))
            except ProtocolError as error:
                self._engine.event("protocol.error", f"on front: {error}")
        return True

    def serve_later(self) -> None:
        """Handle the messages that have waited, once the engine serves or never will."""
        if self._later and (self._hopeless or not self._engine.health.follows):
            later, self._later = self._later, []
            for client, message in later:
                self._on_message(client, message)

    def answer_waiters(self) -> None:
        """Answer those that wait for another state of the engine."""
        for client, answer in self._waiters.answers(time.monotonic()):
            self._front.reply(client, answer)

    @property
    def _hopeless(self) -> bool:
        """Whether messages that wait for a serving engine are refused instead."""
        return bool(self._engine.health.down or self._engine.health.gave_up)

    def _on_message(self, client: bytes, message: object) -> None:
        engine = self._engine
        waits = engine.health.follows and not self._hopeless and len(self._later) < LATER_MOST
        if waits and isinstance(message, _WAITING):
            self._later.append((client, message))
            return
        match message:
            case Command():
                engine.commands.handle(client, message)
            case Fetch() | ReadOutput():
                engine.outputs.fetch(client, message)
            case Inspect():
                self._front.reply(client, engine.details.answer(message))
            case AddMany():
                engine.offline.add_many(client, message)
            case Follow():
                engine.outputs.follow(client, message)
            case OpenSession():
                engine.offline.open_session(message.session)
            case AbortMany():
                engine.offline.abort(message)
            case EndSamples():
                engine.requests.end_samples(message.samples, message.numbers)
            case ForgetMany():
                engine.outputs.forget(message.requests)
            case MetricsQuery():
                self._front.reply(client, engine.metrics.answer(message))
            case HttpReport():
                engine.metrics.take(message)
            case StageFigures():
                engine.metrics.take_rings(message)
            case StateQuery():
                self._waiters.add(client, message, time.monotonic())
            case ProcessReport():
                self._front.supervisor_is(client)
                engine.on_processes(message)
            case DeviceRooms():
                engine.rooms.take(message)
            case Recall():
                self._recall(message)
