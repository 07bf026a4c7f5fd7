"""The socket of an HTTP process to the core: a callback a message, without a task for each.

`zmq.asyncio` makes futures for every message, and a process that sends each token has thousands a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from ppengine.common.sockets import NOBLOCK, readable


class FrontSocket:
    """A DEALER whose messages go to `take`. Its queues have no limit: each question has one answer."""

    def __init__(self, endpoint: str, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.reconnect_ivl = 20
        self._socket.connect(endpoint)
        self._failed: asyncio.Future[None] | None = None
        self._will_read = False
        """Whether messages are being read, or will be in this turn of the loop."""

    def send(self, message: bytes) -> None:
        """Send a message; it waits in the queue while the core is away."""
        self._socket.send(message, NOBLOCK)
        if self._failed is not None and not self._will_read:
            # The descriptor reports each change once, and sending may have consumed the report of an answer.
            self._will_read = True
            self._failed.get_loop().call_soon(self._read)

    async def run(self) -> None:
        """Hand out messages until this is cancelled. Raises what `take` raises."""
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        descriptor = self._socket.fileno()
        loop.add_reader(descriptor, self._read)
        loop.call_soon(self._read)
        try:
            await self._failed
        finally:
            loop.remove_reader(descriptor)
            self._failed = None
            self._context.destroy(linger=0)

    def _read(self) -> None:
        self._will_read = True
        try:
            while self._failed is not None and not self._failed.done() and readable(self._socket):
                self._take(self._socket.recv(NOBLOCK))
        except Exception as error:  # noqa: BLE001  # It ends `run`, and with it the process.
            assert self._failed is not None, "the loop has seen it"
            self._failed.set_exception(error)
        finally:
            self._will_read = False
