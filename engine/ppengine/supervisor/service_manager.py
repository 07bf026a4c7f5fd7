"""Readiness and watchdog of a service manager, by the datagrams of sd_notify(3); without one, nothing is sent."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

SOCKET, WATCHDOG_US, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
NAMES = (SOCKET, WATCHDOG_US, WATCHDOG_PID)


class ServiceManager:
    """Sends `READY=1` once, `WATCHDOG=1` while the supervisor turns, `STOPPING=1` at the end.

    Nothing here blocks, and a manager that does not read is no reason to end an engine.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._socket: socket.socket | None = None
        self._period_s: float | None = None
        self._sent_at = 0.0
        self._ready = False
        path = environ.get(SOCKET, "")
        if not path.startswith(("/", "@")):
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        # An address that begins with @ is in the abstract namespace.
        self._path = "\0" + path[1:] if path[0] == "@" else path
        limit = environ.get(WATCHDOG_US, "")
        # The pid is that of the service's first process, which may be our parent: the unit lets all of them send.
        if limit.isdecimal() and int(limit) > 0:
            self._period_s = int(limit) / 1e6 / 3

    @classmethod
    def adopt(cls) -> ServiceManager:
        """Return the manager that the environment names, and keep its variables from the children."""
        manager = cls(os.environ)
        for name in NAMES:
            os.environ.pop(name, None)
        return manager

    def resume(self) -> None:
        """Feed the watchdog from now on: it runs since a supervisor before this one was ready."""
        self._ready = True

    def ready(self, text: str) -> None:
        """Say that the service has started."""
        self._ready = True
        self._send(f"READY=1\nSTATUS={text}")

    def alive(self) -> None:
        """Feed the watchdog, three times within its limit, which begins with `ready`; call it at each turn."""
        now = time.monotonic()
        if self._ready and self._period_s is not None and now - self._sent_at >= self._period_s:
            self._sent_at = now
            self._send("WATCHDOG=1")

    def stopping(self, text: str) -> None:
        """Say that the service ends, and why."""
        self._send(f"STOPPING=1\nSTATUS={text}")

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, text: str) -> None:
        if self._socket is not None:
            try:
                self._socket.sendto(text.encode("utf-8", "replace"), self._path)
            except OSError:
                return  # Its queue is full, or it is gone.
