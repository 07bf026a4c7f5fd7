"""The ZAP handler: libzmq asks it about the key of every peer, before a byte of that peer reaches a decoder.

It has a thread and a socket of its own, and fails closed: without an answer libzmq refuses the peer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

import zmq

from ppengine.common.curve import LOCAL
from ppengine.common.refusal_log import RefusalLog
from ppengine.common.sockets import readable

log = logging.getLogger("ppengine.zap")

Accepts = Callable[[str], bool]
"""Returns whether a key is allowed."""

ENDPOINT = "inproc://zeromq.zap.01"
_KEY_BYTES = 32
_VERSION = b"1.0"
_PROBE = b"PROBE"
"""Mechanism of the gateway's own question whether the handler answers; no peer can choose it."""


class ZapHandler:
    """Accepts the keys that are allowed in a socket's domain. The User-Id of each message is then the key, in hex."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        accepts: Mapping[bytes, Accepts],
        refusals: Callable[[str], object] | None = None,
    ) -> None:
        """Start the thread. `accepts`: by domain. Raises zmq.ZMQError if the context has a handler."""
        self._context, self._accepts, self._refusals = context, accepts, refusals or RefusalLog(log)
        self._thread = self._start()
        self._probe: zmq.Socket[bytes] | None = None
        self._probed: float | None = None
        """Time of the probe that is not answered."""

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
        self.close_probe()
        return True

    def hung_s(self, now: float) -> float:
        """Return for how long the thread has not answered a probe, in seconds; call it once a second."""
        if self._probe is None:
            self._probe, self._probed = self._context.socket(zmq.DEALER), None
            self._probe.linger = 0
            self._probe.connect(ENDPOINT)
        while readable(self._probe):
            self._probe.recv_multipart()
            self._probed = None
        if self._probed is None:
            self._probe.send_multipart([b"", _VERSION, b"1", b"", b"", b"", _PROBE], zmq.NOBLOCK)
            self._probed = now
        return now - self._probed

    def close_probe(self) -> None:
        """Close the socket of the probes; the next one has another."""
        if self._probe is not None:
            self._probe.close(linger=0)
            self._probe = None

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
        number, domain, address, mechanism, credentials = request[1], request[2], request[3], request[5], request[6:]
        if mechanism == _PROBE:
            return [_VERSION, number, b"400", b"", b"", b""]
        if mechanism == b"NULL" and domain == LOCAL:
            return [_VERSION, number, b"200", b"", b"", b""]
        curve = mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == _KEY_BYTES
        key = credentials[0].hex() if curve else ""
        try:
            accepts = self._accepts.get(domain)
            accepted = curve and accepts is not None and accepts(key)
        except Exception:
            log.exception("the key %s cannot be checked: it is refused", key)
            accepted = False
        if not accepted:
            self._refusals(f"refused key {key or 'none'} from {address.decode('ascii', 'replace')}")
            return [_VERSION, number, b"400", b"this key is not allowed", b"", b""]
        return [_VERSION, number, b"200", b"", key.encode(), b""]
