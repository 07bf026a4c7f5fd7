"""A slow link: it carries TCP connections with a delay and at a limited rate, as a long way does."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence

ONE_WAY_S, BYTES_S = 0.1, 125_000
"""Delay of each direction in seconds, and bytes a second: 1 Mbit/s."""


def free_port() -> int:
    """Return the first of three consecutive free ports."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            for number in (port + 1, port + 2):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port


class Relay:
    """Listens on three ports from `port` on, one for each of `targets`: host and port, or the path of a socket.

    All connections share the rate of a direction, as on one line.
    """

    def __init__(self, targets: Sequence[tuple[str, int] | str]) -> None:
        self._targets, self.port = targets, free_port()
        self.bytes = {True: 0, False: 0}
        """Bytes so far, to the console (True) and from it."""

    async def __aenter__(self) -> Relay:
        self._free_at = {True: 0.0, False: 0.0}
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers = [
            await asyncio.start_server(lambda r, w, to=target: self._serve(r, w, to), "127.0.0.1", self.port + number)
            for number, target in enumerate(self._targets)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: tuple[str, int] | str
    ) -> None:
        if isinstance(target, str):
            far_reader, far_writer = await asyncio.open_unix_connection(target)
        else:
            far_reader, far_writer = await asyncio.open_connection(*target)
        for down, source, sink in ((False, reader, far_writer), (True, far_reader, writer)):
            line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=64)
            for work in (self._take(down, source, line), self._give(line, sink)):
                self._tasks.add(asyncio.create_task(work))

    async def _take(self, down: bool, source: asyncio.StreamReader, line: asyncio.Queue[tuple[float, bytes]]) -> None:
        """Read at the rate of the link, which all connections share."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await source.read(1500):
                self.bytes[down] += len(data)
                self._free_at[down] = max(self._free_at[down], loop.time()) + len(data) / BYTES_S
                await asyncio.sleep(self._free_at[down] - loop.time())
                await line.put((loop.time() + ONE_WAY_S, data))
        await line.put((0.0, b""))

    async def _give(self, line: asyncio.Queue[tuple[float, bytes]], sink: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while (item := await line.get())[1]:
                await asyncio.sleep(item[0] - loop.time())
                sink.write(item[1])
                await sink.drain()
        sink.close()
