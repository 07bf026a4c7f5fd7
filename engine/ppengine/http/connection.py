"""Connections of the HTTP server, to which an answer may write chunks by itself."""

from __future__ import annotations

import asyncio

from starlette.types import Scope
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

TRANSPORT = "ppengine.transport"
"""Name of the extension of a scope."""
HEAD_MOST = 65_536
"""Bytes of a request's first line and headers that are waited for; those of one read more are taken."""
QUIET_S = 30.0
"""Seconds without a byte of a request that has not come in full."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection; the scope of a request has its transport.

    The way of an event through ASGI took as long as its system call: three wrappers, a message and a header each.
    uvicorn waits for the rest of a request for ever, and keeps headers of any size.
    """

    _head = 0
    """Bytes of a request whose headers have not ended."""
    _in_head = True
    _arrives = True
    """Whether more of a request must come."""
    _heard_at = 0.0
    _timer: asyncio.TimerHandle

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heard_at = self.loop.time()
        self._timer = self.loop.call_later(QUIET_S, self._look)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    @override
    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        self._head += len(data)
        super().data_received(data)
        if self._in_head and self._head > HEAD_MOST:
            self._end(b"431 Request Header Fields Too Large")

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arrives = True
        self.scope["extensions"] = {TRANSPORT: {"transport": self.transport}}

    @override
    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    @override
    def on_message_complete(self) -> None:
        self._head, self._in_head, self._arrives = 0, True, False
        super().on_message_complete()

    def _look(self) -> None:
        """End a connection whose request does not go on."""
        left = self._heard_at + QUIET_S - self.loop.time()
        if self._arrives and left <= 0:
            self._end(b"408 Request Timeout")
        else:
            self._timer = self.loop.call_later(max(left, QUIET_S / 2), self._look)

    def _end(self, status: bytes) -> None:
        """Answer that a request is refused, and close. An answer under way is cut: it has no place for another."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()
            return
        if self._head:
            self.transport.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        self.transport.close()


def transport_of(scope: Scope) -> asyncio.WriteTransport:
    """Return the transport of a request's connection."""
    found: asyncio.WriteTransport = scope["extensions"][TRANSPORT]["transport"]
    return found
