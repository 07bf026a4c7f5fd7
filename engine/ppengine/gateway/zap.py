"""The ZAP handler: libzmq asks it about the key of every peer, before a byte of that peer reaches a decoder.

It has a thread and a socket of its own, and fails closed: without an answer libzmq refuses the peer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import zmq

log = logging.getLogger("ppengine.gateway")

ENDPOINT = "inproc://zeromq.zap.01"
_KEY_BYTES = 32
_VERSION = b"1.0"
_LOG_S = 1.0
"""Least seconds between two lines about refusals: a stranger must not fill the disk."""


class ZapHandler:
    """Accepts the keys for which `accepts` is true. The User-Id of each message is then the key, in hex."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], accepts: Callable[[str], bool]) -> None:
        """Start the thread. Raises zmq.ZMQError if the context has a handler."""
        self._context, self._accepts = context, accepts
        self._unlogged, self._log_due = 0, 0.0
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        socket = self._context.socket(zmq.REP)
        socket.linger = 0
        try:
            socket.bind(ENDPOINT)
        except zmq.ZMQError:
            socket.close()
            raise
        thread = threading.Thread(target=self._serve, args=(socket,), name="zap", daemon=True)
        thread.start()
        return thread

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def revive(self) -> bool:
        """Start another thread if this one has ended; return whether it had."""
        if self.alive:
            return False
        self._thread = self._start()
        return True

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        """Answer until the context ends."""
        try:
            while True:
                socket.send_multipart(self._answer(socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            socket.close(linger=0)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        if len(request) < 6 or request[0] != _VERSION:
            return [_VERSION, request[1] if len(request) > 1 else b"", b"500", b"not a ZAP 1.0 request", b"", b""]
        number, address, mechanism, credentials = request[1], request[3], request[5], request[6:]
        curve = mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == _KEY_BYTES
        key = credentials[0].hex() if curve else ""
        try:
            accepted = curve and self._accepts(key)
        except Exception:
            log.exception("the key %s cannot be checked: it is refused", key)
            accepted = False
        if not accepted:
            self._log(key or "none", address.decode("ascii", "replace"))
            return [_VERSION, number, b"400", b"this key is not allowed", b"", b""]
        return [_VERSION, number, b"200", b"", key.encode(), b""]

    def _log(self, key: str, address: str) -> None:
        now = time.monotonic()
        if now < self._log_due:
            self._unlogged += 1
            return
        more = f", and {self._unlogged} others" if self._unlogged else ""
        log.warning("refused key %s from %s%s", key, address, more)
        self._unlogged, self._log_due = 0, now + _LOG_S
