"""Wake-ups of the supervisor: signals, the end of a child, the end of its own parent."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from types import FrameType

import zmq

ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Wakeup:
    """Turns signals into `asked`, the reason to stop, and lets the main loop sleep until something happens."""

    def __init__(self) -> None:
        self.asked = ""
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        # nohup ignores SIGHUP for its child; that wish outlives our start.
        self._endings = [one for one in ENDINGS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]

    def install(self) -> None:
        """Take the signals. Main thread only."""
        for number in self._endings:
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def ask(self, reason: str) -> None:
        """Ask the main loop to stop; any thread may. The first reason stays."""
        self.asked = self.asked or reason
        # Full: a wakeup is on its way. Closed: the main loop has ended.
        with contextlib.suppress(OSError):
            os.write(self._writer.fileno(), b"\0")

    def wait(self, timeout: float, readable: zmq.Socket[bytes] | None) -> None:
        """Sleep up to `timeout` seconds, less if a signal comes or `readable` has a message."""
        poller = zmq.Poller()
        poller.register(self._reader, zmq.POLLIN)
        if readable is not None:
            poller.register(readable, zmq.POLLIN)
        woken = dict(poller.poll(int(timeout * 1000)))
        if self._reader.fileno() in woken:
            self._reader.recv(4096)

    def close(self) -> None:
        """Give the signals back to Python's defaults."""
        signal.set_wakeup_fd(-1)
        for number in self._endings:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._reader.close()
        self._writer.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or f"{signal.Signals(number).name} received"
