"""Sockets of the gateway, with options that make a slow or hostile peer cost nothing."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zmq

from ppengine.common import curve
from ppengine.common.cluster import HANDSHAKE_MS, NAMES
from ppengine.common.config import EngineConfig
from ppengine.common.sockets import NOBLOCK, Bindings, bind_tcp, readable
from ppengine.gateway.connections import Connections
from ppengine.protocol.discovery import SOCKET_PATH_MOST
from ppengine.protocol.frames import MAX_FRAME_BYTES
from ppengine.protocol.keys import KeyFileError, Keypair, write_keypair

Socket = zmq.Socket[bytes]
STATE_HWM = 20
"""Messages queued for one slow subscriber; then its newest are dropped."""
TCP_BUFFER = 128 * 1024
"""Bytes that the kernel holds for a TCP peer: a second at 1 Mbit/s, and not the half minute of its default."""
BURST = 200
"""Messages taken from one socket before the next socket's turn."""
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class Sockets:
    """Binds the public sockets, `collect`, `report`, `agent` and `texts`, connects to the core."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        config: EngineConfig,
        server: Keypair,
        connections: Connections | None = None,
    ) -> None:
        """Open all; `server` is the keypair of the public ones. `connections` counts those of their ports.

        Raises OSError if a path is too long, and zmq.ZMQError.
        """
        longest = max(len(os.fsencode(config.endpoint(name))) for name in ("control", "collect", "report")) - len(
            "ipc://"
        )
        if longest > SOCKET_PATH_MOST:
            raise OSError(f"socket paths in {config.run_dir} have {longest} bytes, at most {SOCKET_PATH_MOST} work")
        self._context, self._config, self._server, self._connections = context, config, server, connections
        self._bindings = Bindings()
        self.state = self._public("state", zmq.XPUB, STATE_HWM)
        self.control = self._public("control", zmq.ROUTER, 1000)
        self.bulk = self._public("bulk", zmq.ROUTER, 100)
        self.collect = self._private("collect")
        self.report = self._private("report")
        self.front = self._connect(context, config, "front")
        self.agent = self._private("agent", zmq.ROUTER)
        # An agent that is restarted connects under the name of its predecessor.
        self.agent.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Nothing queues for an absent agent: sending fails at once.
        self.agent.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.texts = self._private("texts", zmq.ROUTER)
        self.texts.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.texts.setsockopt(zmq.ROUTER_MANDATORY, 1)

    def close(self, linger_ms: int = 0) -> None:
        """Close all; queued messages have `linger_ms` to leave."""
        for socket in (
            self.state,
            self.control,
            self.bulk,
            self.collect,
            self.report,
            self.front,
            self.agent,
            self.texts,
        ):
            socket.close(linger=linger_ms)

    def look(self) -> list[str]:
        """Make the files again that are gone, the server's key with them; return the names of the sockets."""
        made = self._bindings.look()
        if made:
            with contextlib.suppress(KeyFileError):
                write_keypair(Path(self._config.run_dir) / "server.key", self._server, replace=False)
        return made

    def reopen_state(self) -> None:
        """Close `state` and bind it again: subscribers connect by themselves, and the ZAP handler sees each key."""
        if self._connections is not None:
            self._connections.leave("state")
        self.state.close(linger=0)
        self.state = self._public("state", zmq.XPUB, STATE_HWM)

    def _public(self, name: str, kind: int, hwm: int) -> Socket:
        socket = self._socket(kind)
        socket.setsockopt(zmq.SNDHWM, hwm)
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if kind == zmq.XPUB:
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        curve.be_server(socket, self._server)
        self._bindings.bind(socket, self._config.endpoint(name))
        listen = self._config.listen
        if listen is not None:
            socket.setsockopt(zmq.IPV6, int(listen.six))
            socket.setsockopt(zmq.SNDBUF, TCP_BUFFER)
            if self._connections is not None:
                self._connections.watch(name, socket)
            bind_tcp(socket, listen.endpoint(name))
        return socket

    def _private(self, name: str, kind: int = zmq.PULL) -> Socket:
        socket = self._socket(kind)
        self._bindings.bind(socket, self._config.endpoint(name))
        if name in NAMES:
            self._config.listen_for_nodes(socket, name)
        return socket

    def _socket(self, kind: int) -> Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RCVHWM, 1000)
        return socket

    @staticmethod
    def _connect(context: zmq.Context[Socket], config: EngineConfig, name: str) -> Socket:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, b"gateway")
        socket.setsockopt(zmq.SNDHWM, 1000)
        # Nothing queues for an absent peer: sending fails at once.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.connect(config.endpoint(name))
        return socket


def drain(socket: Socket) -> Iterator[list[bytes]]:
    """Yield the waiting messages of `socket`, at most a burst."""
    for _ in range(BURST):
        if not readable(socket):
            return
        try:
            yield socket.recv_multipart(NOBLOCK)
        except zmq.Again:
            return


class Received(NamedTuple):
    """A message of a console. `key` is that of its connection, which it cannot choose; `address` empty: this host."""

    client: bytes
    parts: list[bytes]
    key: str
    address: str


def received(socket: Socket) -> Iterator[Received]:
    """Yield the waiting messages of a public ROUTER, at most a burst."""
    for _ in range(BURST):
        if not readable(socket):
            return
        try:
            client, *parts = socket.recv_multipart(NOBLOCK, copy=False)
        except zmq.Again:
            return
        key, address = client.get("User-Id"), client.get("Peer-Address")
        yield Received(client.bytes, [part.bytes for part in parts], str(key), _remote(str(address)))


@functools.lru_cache(maxsize=1024)
def _remote(address: str) -> str:
    """Return the address of a TCP peer; a local socket has the process there, and that is none."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return ""


def send(socket: Socket, frames: list[bytes]) -> bool:
    """Send without waiting; return whether it was taken (an absent or full peer drops it)."""
    try:
        for frame in frames[:-1]:
            socket.send(frame, _MORE)
        socket.send(frames[-1], NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    return True
