"""The three sockets of one attached console, with the options that keep it honest."""

from __future__ import annotations

import contextlib

import msgspec
import zmq
import zmq.asyncio
import zmq.utils.monitor
from ppengine.protocol.control import Goodbye
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.frames import (
    MAX_FRAME_BYTES,
    TOPIC_EVENT,
    TOPIC_HEARTBEAT,
    Codec,
    Header,
    decode_header,
    encode,
    header,
    split,
)
from ppengine.protocol.keys import KeyFileError

from ppconsole.link.keypair import client_keypair, encrypt

_REFUSED = zmq.Event.HANDSHAKE_FAILED_AUTH
_MONITORED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_GOODBYE_MS = 100
"""Milliseconds for a last message to leave this process; with a connected gateway it leaves at once."""


class Sockets:
    """SUB on `state`, DEALERs on `control` and `bulk`, all encrypted. Made inside the running loop, closed by `close`.

    Raises KeyFileError and zmq.ZMQError.
    """

    def __init__(self, context: zmq.asyncio.Context, record: EngineRecord, snapshot_topic: bytes) -> None:
        self._context = context
        self._record = record
        if not record.server_key:
            raise KeyFileError(f"{record.label} has no key: another version started it")
        self.keypair = client_keypair()
        self._linger_ms = 0
        self._topics: tuple[bytes, ...] = (snapshot_topic, TOPIC_EVENT, TOPIC_HEARTBEAT)
        self.control = self._connect(zmq.DEALER, record.control_endpoint)
        self.bulk = self._connect(zmq.DEALER, record.bulk_endpoint)
        self.state = self._subscribe()
        # libzmq reconnects by itself without a report, and messages under way are lost with the old connection.
        self.breaks = [socket.get_monitor_socket() for socket in (self.control, self.bulk)]

    def reopen_state(self) -> None:
        """Drop what a slow pipe holds: it would be old."""
        self.state.close()
        self.state = self._subscribe()

    def use_snapshots(self, topic: bytes) -> None:
        """Subscribe to another topic of snapshots, in place of the first."""
        before, *others = self._topics
        self._topics = (topic, *others)
        self.state.subscribe(topic)
        self.state.unsubscribe(before)

    def say_goodbye(self, epoch: str) -> None:
        """Put it on the wire if one is connected."""
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(self.control)
        with contextlib.suppress(zmq.ZMQError):
            plain.send_multipart(_frames(self._record, epoch, Goodbye()), zmq.NOBLOCK)
        self._linger_ms = _GOODBYE_MS

    def close(self) -> None:
        """Close all three at once; drop unsent messages, except a goodbye."""
        for socket in (self.control, self.bulk):
            socket.disable_monitor()
        for socket in (*self.breaks, self.state, self.bulk):
            socket.close(linger=0)
        self.control.close(linger=self._linger_ms)

    def _subscribe(self) -> zmq.asyncio.Socket:
        socket = self._connect(zmq.SUB, self._record.state_endpoint)
        for topic in self._topics:
            socket.subscribe(topic)
        return socket

    def _connect(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        encrypt(zmq.Socket.shadow(socket), self.keypair, self._record.server_key)
        if kind != zmq.SUB:
            # Nothing queues for an engine that is not there. Not for SUB: libzmq 4.3.5 would drop the pipe of a lost
            # connection at once, and abort the process if that came between two parts of a message (fq.cpp: !_more).
            socket.setsockopt(zmq.IMMEDIATE, 1)
            # Before it connects: a refusal may come at once, and libzmq does not try again after it.
            socket.get_monitor_socket(_MONITORED)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        # A gateway that was replaced is there again within a second.
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RCVHWM, 1000)
        socket.connect(endpoint)
        return socket


async def refused(monitor: zmq.asyncio.Socket) -> None:
    """Wait until the engine refuses the key of a connection."""
    while zmq.utils.monitor.parse_monitor_message(await monitor.recv_multipart())["event"] != _REFUSED:
        pass


async def send(socket: zmq.asyncio.Socket, record: EngineRecord, epoch: str, message: msgspec.Struct) -> None:
    """Send one message with its header; waits while no engine is connected."""
    await socket.send_multipart(_frames(record, epoch, message))


def _frames(record: EngineRecord, epoch: str, message: msgspec.Struct) -> list[bytes]:
    return [encode(header(record.id, epoch)), encode(message)]


async def receive(socket: zmq.asyncio.Socket, codec: Codec) -> tuple[Header, object]:
    """Return the next message of `control` or `bulk`. Raises ProtocolError."""
    head, body = split(await socket.recv_multipart())
    return decode_header(head), codec.decode(body)
