"""Bytes for connections: those of one message of the core are written together, behind all work on it.

A system call between two tokens pushes code and data of the answers out of the processor's caches.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

log = logging.getLogger("ppengine.http")

BUFFER_MOST = 65_536
"""Bytes that wait for a client before its events are held back: uvicorn's limit."""
JOINED_MOST = 4096
"""Bytes to which others are joined, which copies them: a connection may have a thousand choices in a message."""


class Writer(Protocol):
    """One who writes to a connection."""

    def fill(self) -> None:
        """Note that more than `BUFFER_MOST` bytes wait for the client."""
        ...


class Outbox:
    """Writes bytes at once, or at the end of a `with` block that is open."""

    __slots__ = ("_collects", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[tuple[asyncio.WriteTransport, bytes, Writer]] = []
        """Bytes in the order in which they are written."""
        self._collects = False

    def write(self, transport: asyncio.WriteTransport, data: bytes, writer: Writer) -> None:
        """Write bytes of `writer`; those for a connection that is closed are dropped."""
        if self._waiting and self._waiting[-1][0] is transport and len(self._waiting[-1][1]) < JOINED_MOST:
            data = self._waiting.pop()[1] + data
        self._waiting.append((transport, data, writer))
        if not self._collects:
            self._flush()

    def __enter__(self) -> None:
        self._collects = True

    def __exit__(self, *error: object) -> None:
        self._collects = False
        self._flush()

    def _flush(self) -> None:
        for transport, data, writer in self._waiting:
            if transport.is_closing():
                continue  # The client has left; uvicorn reports that in a later turn of the loop.
            try:
                transport.write(data)
            except Exception:
                # It must not end the link, which serves the other clients too.
                log.exception("a connection cannot be written to; it is cut")
                transport.abort()
                continue
            if transport.get_write_buffer_size() > BUFFER_MOST:
                writer.fill()
        self._waiting.clear()
