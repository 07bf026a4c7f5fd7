"""One attachment to one epoch of an engine: handshake, readers, pings. It ends with SessionOver."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
import zmq.asyncio
from ppengine.protocol.control import (
    Command,
    Failed,
    Fetched,
    FromBulk,
    FromGateway,
    Hello,
    Inspected,
    Ping,
    Pong,
    Refused,
    Replayed,
    Reply,
    ToBulk,
    Welcome,
)
from ppengine.protocol.discovery import EngineRecord, alive
from ppengine.protocol.frames import (
    PROTOCOL,
    PROTOCOL_MIN,
    TOPIC_EVENT,
    TOPIC_SNAPSHOT,
    TOPIC_SNAPSHOT_PACKED,
    TOPIC_SNAPSHOT_SLOW,
    Codec,
    ProtocolError,
    decode_as,
    decode_header,
    split,
    unpack,
)
from ppengine.protocol.keys import KeyFileError
from ppengine.protocol.past_files import PastListed, PastPart
from ppengine.protocol.snapshot import Event, Events, Snapshot

from ppconsole.link.pending import forsake
from ppconsole.link.sockets import Sockets, receive, refused, send
from ppconsole.link.source import LinkLost, QueryFailed

DRAIN = 2000
"""Most messages taken in one go before other tasks get their turn."""
_PACKED_SINCE = 2
"""First protocol version of a gateway with the packed topic."""
_LAST_MS = 50
"""The last messages of an engine may come this much later than the news that it has closed."""

Answer = Fetched | Inspected | Replayed | PastListed | PastPart


class SessionOver(Exception):
    """This attachment is at its end; the text says why."""


class KeyRefused(SessionOver):
    """The engine does not allow the key of this console."""


@dataclass(frozen=True)
class Timing:
    """Seconds. `ask_s` is added to what a question itself asks the engine to wait."""

    ping_s: float = 1.0
    stale_s: float = 2.0
    lost_s: float = 5.0
    hello_s: float = 3.0
    ask_s: float = 10.0
    jitter_s: float = 0.2
    backoff_s: float = 0.2
    backoff_cap_s: float = 5.0
    gather_s: float = 0.0
    """Snapshots and events are taken no more often: a wake-up costs a console more than a message."""


@dataclass(frozen=True)
class Handlers:
    """The receivers of each kind of message."""

    snapshot: Callable[[Snapshot], None]
    events: Callable[[list[Event]], None]
    answer: Callable[[Reply], None]
    stale: Callable[[float, str], None]


class Session:
    """Sockets after a handshake. `run` reads until the end; `send_command` and `ask` may be used meanwhile."""

    def __init__(self, record: EngineRecord, sockets: Sockets, welcome: Welcome, topic: bytes, timing: Timing) -> None:
        self.record = record
        self.welcome = welcome
        self.role = welcome.role
        """Rights of this console's key, by the newest answer to a ping."""
        self._sockets = sockets
        self._topic = topic
        self._timing = timing
        self._nonces = itertools.count(1)
        self._questions: dict[int, asyncio.Future[Answer]] = {}
        self._bulk_codec = Codec(FromBulk)
        self._control_codec = Codec(FromGateway)
        self._last_snapshot = self._last_pong = time.monotonic()
        self._step = 0
        self._reopen = False

    @staticmethod
    async def open(
        context: zmq.asyncio.Context,
        record: EngineRecord,
        *,
        user: str,
        read_only: bool,
        passing: bool = False,
        topic: bytes = TOPIC_SNAPSHOT,
        timing: Timing | None = None,
        console: str = "",
    ) -> Session:
        """Subscribe, then say Hello, so that no event falls between. Raises SessionOver."""
        timing = timing or Timing()
        hello = Hello(
            proto_min=PROTOCOL_MIN,
            proto_max=PROTOCOL,
            client=f"ppconsole/{os.getpid()}",
            user=user,
            read_only=read_only,
            passing=passing,
            console=console,
        )
        try:
            sockets = Sockets(context, record, topic)
        except zmq.ZMQError as error:
            raise SessionOver(f"{record.label}: no socket to it: {error}") from None
        except KeyFileError as error:
            raise KeyRefused(str(error)) from None
        try:
            async with asyncio.timeout(timing.hello_s):
                welcome = await _shake_hands(sockets, record, hello)
        except TimeoutError:
            sockets.close()
            # An engine says nothing to a client that has another key of it in mind.
            hint = "; port and pinned key may be wrong" if record.remote else ""
            text = f"{record.label} does not answer within {timing.hello_s:g} s{hint}"
            raise SessionOver(text) from None
        except (ProtocolError, zmq.ZMQError) as error:
            sockets.close()
            raise SessionOver(f"{record.label}: {error}") from None
        except BaseException:
            sockets.close()
            raise
        if topic == TOPIC_SNAPSHOT_PACKED and welcome.proto < _PACKED_SINCE:
            topic = TOPIC_SNAPSHOT_SLOW
            sockets.use_snapshots(topic)
        return Session(record, sockets, welcome, topic, timing)

    async def run(self, handlers: Handlers) -> None:
        """Deliver until the link breaks. Always raises: SessionOver, or CancelledError when it is cancelled."""
        self._last_snapshot = self._last_pong = time.monotonic()
        readers = (self._read_state(handlers), self._read_control(handlers), self._read_bulk(), self._watch(handlers))
        breaks = (self._break(monitor) for monitor in self._sockets.breaks)
        tasks = [asyncio.create_task(reader) for reader in (*readers, *breaks)]
        broken = False
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            broken = True
            for task in done:
                task.result()
        except (ProtocolError, zmq.ZMQError) as error:
            raise SessionOver(str(error)) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if broken:
                await self._hear_out(handlers)
            else:
                self._sockets.say_goodbye(self.welcome.epoch)
            self.close()

    def close(self) -> None:
        """Close the sockets; questions that are open end as lost."""
        self._sockets.close()
        for future in self._questions.values():
            if not future.done():
                future.set_exception(LinkLost("the link broke before the engine answered", sent=True))

    async def send_command(self, command: Command) -> None:
        """Put a command on the wire; waits while nothing is connected, so give it a deadline. Raises LinkLost."""
        await self._put(self._sockets.control, command)

    async def ask(self, question: ToBulk, wait_s: float = 0.0) -> Answer:
        """Ask on `bulk` and return the answer. Raises LinkLost, QueryFailed."""
        question.nonce = next(self._nonces)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._questions[question.nonce] = future
        limit = self._timing.ask_s + wait_s
        try:
            async with asyncio.timeout(limit):
                await self._put(self._sockets.bulk, question)
                return await future
        except TimeoutError:
            raise LinkLost(f"no answer within {limit:g} s", sent=True) from None
        finally:
            del self._questions[question.nonce]
            forsake(future)

    async def _put(self, socket: zmq.asyncio.Socket, message: Command | ToBulk) -> None:
        try:
            await send(socket, self.record, self.welcome.epoch, message)
        except zmq.ZMQError as error:
            raise LinkLost(f"not sent, nothing happened: the link broke ({error})", sent=False) from None
        except asyncio.CancelledError:
            # Closing a socket cancels what waits to be sent on it. That is no cancellation of the caller.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise LinkLost("not sent, nothing happened: the link broke", sent=False) from None

    async def _hear_out(self, handlers: Handlers) -> None:
        """Take the last messages of an engine that closed: its last snapshot has the reason."""
        with contextlib.suppress(SessionOver, ProtocolError, zmq.ZMQError):
            if await self._sockets.state.poll(_LAST_MS):
                self._take_state(handlers)

    async def _read_state(self, handlers: Handlers) -> None:
        while True:
            if self._reopen:  # here, because closing a socket under its reader would cancel the reader
                self._reopen = False
                self._sockets.reopen_state()
            socket = self._sockets.state
            if not await socket.poll(int(1000 * self._timing.stale_s)):
                continue
            self._take_state(handlers)
            await asyncio.sleep(self._timing.gather_s)

    def _take_state(self, handlers: Handlers) -> None:
        """Hand on what has come; of several snapshots the newest."""
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._sockets.state)  # messages that have arrived need no futures
        newest: bytes | None = None
        for _ in range(DRAIN):
            try:
                topic, head_frame, body = split(plain.recv_multipart(zmq.NOBLOCK), 3)
            except zmq.Again:
                break
            if decode_header(head_frame).epoch != self.welcome.epoch:
                raise SessionOver("the engine restarted: its snapshots carry a new epoch")
            if topic == self._topic:  # a subscription is a prefix: `snap` brings `snap1` too
                newest = body
            elif topic == TOPIC_EVENT:
                handlers.events(decode_as(Events, body).events)
        if newest is not None:
            self._last_snapshot = time.monotonic()
            body = unpack(newest) if self._topic == TOPIC_SNAPSHOT_PACKED else newest
            handlers.snapshot(decode_as(Snapshot, body))

    async def _read_control(self, handlers: Handlers) -> None:
        while True:
            head, message = await receive(self._sockets.control, self._control_codec)
            if head.epoch != self.welcome.epoch:
                raise SessionOver("the engine restarted: its answers carry a new epoch")
            self._last_pong = time.monotonic()
            if isinstance(message, Pong):
                self._step, self.role = message.step, message.role or self.role
                if not message.known:
                    raise SessionOver("the engine's gateway was replaced")
            elif isinstance(message, Reply):
                handlers.answer(message)

    async def _read_bulk(self) -> None:
        while True:
            _, message = await receive(self._sockets.bulk, self._bulk_codec)
            if not isinstance(message, Answer | Failed):
                continue
            future = self._questions.get(message.nonce)
            if future is None or future.done():
                continue
            if isinstance(message, Failed):
                future.set_exception(QueryFailed(message.code, message.text))
            else:
                future.set_result(message)

    async def _watch(self, handlers: Handlers) -> None:
        """Ping, and judge silence: of snapshots (stale), of everything (over), of the process (over at once)."""
        timing, reopened = self._timing, time.monotonic()
        for nonce in itertools.count(1):
            # First the wait: a verb that takes less never pings, and is not counted as a console.
            await asyncio.sleep(timing.ping_s)
            with contextlib.suppress(TimeoutError):  # not connected now: silence is judged below
                async with asyncio.timeout(timing.ping_s):
                    await send(self._sockets.control, self.record, self.welcome.epoch, Ping(nonce=nonce))
            now = time.monotonic()
            if not alive(self.record):
                raise SessionOver(f"{self.record.label} has ended: pid {self.record.pid}")
            if now - self._last_pong > timing.lost_s:
                raise SessionOver(f"no answer to pings for {now - self._last_pong:.0f} s")
            age = now - self._last_snapshot
            if age > timing.stale_s:
                answers = now - self._last_pong <= 2 * timing.ping_s + 0.5
                handlers.stale(age, f"it still answers pings, at step {self._step}" if answers else "it is silent")
                if now - reopened > timing.stale_s:
                    reopened = now
                    self._reopen = True

    async def _break(self, monitor: zmq.asyncio.Socket) -> None:
        """Wait for the end of a connection: a process closes it at its death, ZeroMQ after a silence of seconds."""
        await monitor.recv_multipart()
        if time.monotonic() - max(self._last_pong, self._last_snapshot) > self._timing.stale_s:
            raise SessionOver("the gateway is silent; ppconsole explain says why")
        raise SessionOver("the engine's gateway closed the connection")


async def _shake_hands(sockets: Sockets, record: EngineRecord, hello: Hello) -> Welcome:
    """Return the answer to Hello. Raises SessionOver if the engine refuses the console or its key."""
    welcome = asyncio.create_task(_welcome(sockets.control, record, hello))
    refusal = asyncio.create_task(refused(sockets.breaks[0]))
    try:
        await asyncio.wait((welcome, refusal), return_when=asyncio.FIRST_COMPLETED)
        if welcome.done():
            return welcome.result()
    finally:
        welcome.cancel()
        refusal.cancel()
        await asyncio.gather(welcome, refusal, return_exceptions=True)
    allow = f"ppconsole key allow NAME {sockets.keypair.public} --role operator"
    raise KeyRefused(f"the engine does not allow the key of this console; on its host: {allow}")


async def _welcome(control: zmq.asyncio.Socket, record: EngineRecord, hello: Hello) -> Welcome:
    codec = Codec(FromGateway)
    await send(control, record, record.epoch, hello)
    while True:
        _, message = await receive(control, codec)
        if isinstance(message, Welcome):
            return message
        if isinstance(message, Refused):
            raise SessionOver(f"the engine refuses this console: {message.text} ({message.code})")
