"""Connections of the HTTP server, to which an answer may write chunks by itself."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Scope
from typing_extensions import override
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

TRANSPORT = "ppengine.transport"
"""Name of the extension of a scope. It has the transport of the request's connection, and uvicorn's cycle."""
HEAD_MOST = 65_536
"""Bytes of a request's first line and headers that are waited for; those of one read more are taken. As many are
taken between two pieces of its body, or behind it: sizes and extensions of chunks, and trailers."""
HEADERS_MOST = 256
"""Headers of a request. Each takes hundreds of bytes here, and as few as four on the wire."""
_LARGE = b"431 Request Header Fields Too Large"
QUIET_S = 30.0
"""Seconds without a byte of a request that has not come in full."""
IDLE_S = 100
"""Seconds between two requests of a connection. Clients keep unused ones for less, Go's for 90 s; a request that they
send on one while it is closed here fails. uvicorn's 5 s are those of openai-python, and aiohttp has 15."""
LEAVE_S = 1
"""Seconds in which clients can read the ends of their answers when this process leaves in order."""
PROBE_S, PROBE_MOST_S = 0.1, 15.0
"""Seconds from the first to the second sign to a client whose sending side is closed, and between two later ones at
most: each time is three times the one before."""
BEHIND_MOST = 8
"""Requests behind the one that is answered with which a connection is still read, so that its loss is noticed."""
PARSED_AT_ONCE = 4096
"""Bytes after which the parser stops if more requests than `BEHIND_MOST` wait. One read has 64 times that, and
thousands of requests, which take a hundred times their bytes."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b":\n\n"
"""An event that clients ignore."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection; the scope of a request has its transport.

    The way of an event through ASGI took as long as its system call: three wrappers, a message and a header each.
    uvicorn waits for the rest of a request for ever, keeps headers and trailers of any size, takes trailers as headers,
    and drops the body of a request that offers an upgrade: Java's HttpClient offers HTTP/2 with each. It takes a closed
    sending side for a client that has left. Behind each answer it reads on, however many requests wait.
    """

    _head = 0
    """Bytes of a request that has not come in full."""
    _framing = 0
    """Those of them since its first byte, the end of its headers, or its newest piece of a body."""
    _in_head = True
    _arrives = True
    """Whether more of a request must come."""
    _heard_at = 0.0
    _timer: asyncio.TimerHandle
    _watchers: set[Callable[[], object]]
    """Called when the connection is lost. uvicorn notifies the newest of several requests alone."""
    _answered: RequestResponseCycle | None = None
    """The request that is being answered; `cycle` is the newest one."""
    _unparsed = b""
    """Bytes behind requests that wait for the answer to an earlier one."""
    _sent_all = False
    """Whether the client has closed its sending side."""

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # As uvicorn does, without the addresses of both sides: no one reads them here.
        self.connections.add(self)
        self.transport, self.flow, self.scheme = transport, FlowControl(transport), "http"
        self._watchers = set[Callable[[], object]]()
        self._heard_at = self.loop.time()
        self._timer = self.loop.call_later(QUIET_S, self._look)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)
        self.pipeline.clear()
        self._unparsed = b""
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        for watcher in tuple(self._watchers):
            watcher()

    @override
    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        self._unset_keepalive_if_required()
        data, self._unparsed = self._unparsed + data, b""
        for at in range(0, len(data), PARSED_AT_ONCE):
            if len(self.pipeline) > BEHIND_MOST:
                self._unparsed = data[at:]
                self.flow.pause_reading()
                return
            part = data[at : at + PARSED_AT_ONCE]
            self._head += len(part)
            self._framing += len(part)
            try:
                self._feed(part)
            except httptools.HttpParserError:
                self._end(_LARGE if len(self.headers) > HEADERS_MOST else b"400 Bad Request")
                return
            if self._arrives and self._framing > HEAD_MOST:
                self._end(_LARGE)
                return

    def _feed(self, data: bytes) -> None:
        """Parse data. A request that offers an upgrade goes on as one that does not (RFC 9110, 7.8)."""
        left = memoryview(data)
        while True:
            try:
                self.parser.feed_data(left)
                return
            except httptools.HttpParserUpgrade as upgrade:
                left = left[upgrade.args[0] :]
            framing = [one for one in self.headers if one[0] in (b"content-length", b"transfer-encoding")]
            self.parser = httptools.HttpRequestParser(_Resumed(self))
            head = b"".join(b"%b: %b\r\n" % one for one in framing)
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % head)

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arrives = True
        self.scope["extensions"] = {TRANSPORT: {"transport": self.transport, "watchers": self._watchers}}

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # A trailer is no header (RFC 9110, 6.5.1): a proxy may have checked those alone.
            super().on_header(name, value)
            if len(self.headers) > HEADERS_MOST:
                raise OverflowError  # It ends the parser.

    @override
    def on_headers_complete(self) -> None:
        self._in_head, self._framing = False, 0
        super().on_headers_complete()
        self.scope["extensions"][TRANSPORT]["cycle"] = weakref.ref(self.cycle)

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    @override
    def on_body(self, body: bytes) -> None:
        self._framing = 0
        super().on_body(body)

    @override
    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # The parser takes what follows for another protocol.
        self._head, self._framing, self._in_head, self._arrives = 0, 0, True, False
        super().on_message_complete()
        if len(self.pipeline) <= BEHIND_MOST:
            self.flow.resume_reading()  # Its body may have paused it, or the request before it.

    @override
    def on_response_complete(self) -> None:
        super().on_response_complete()
        if len(self.pipeline) > BEHIND_MOST:
            self.flow.pause_reading()
        elif self._unparsed and not self.transport.is_closing():
            self.data_received(b"")
            if self._sent_all and not self._unparsed:
                self.cycle.keep_alive = False

    @override
    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays: its client waits for an answer, and may have closed one side alone.

        A client that has closed both looks the same until bytes are sent to it, which its host then refuses.
        """
        arrives = self._arrives and not self._unparsed
        if arrives or self.cycle is None or self.cycle.response_complete or not self._sign():
            return False
        self._sent_all = True
        if not self._unparsed:
            self.cycle.keep_alive = False
        self._probe(PROBE_S)
        return True

    def _probe(self, next_s: float) -> None:
        """Send bytes without a meaning, and again after `next_s`: the second write fails if the client has left."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        sign = self._sign()
        assert self._answered is not None, "one is under way"
        known: Any = self._answered.scope["extensions"][TRANSPORT]
        if "settle" in known:
            known["settle"]()
        self.transport.write(sign)
        self.loop.call_later(next_s, self._probe, min(3 * next_s, PROBE_MOST_S))

    def _sign(self) -> bytes:
        """Return bytes that mean nothing before an answer, or between two events; none if there are no such bytes."""
        assert self._answered is not None, "one is under way"
        if self._answered.response_started:
            known: Any = self._answered.scope["extensions"][TRANSPORT]
            return bytes(known.get("sign", b""))
        return b"" if self._answered.scope["http_version"] == "1.0" else _CONTINUE

    def _look(self) -> None:
        """End a connection whose request does not go on."""
        if self.flow.read_paused:  # Its client may have sent more.
            self._heard_at = self.loop.time()
        left, answered = self._heard_at + QUIET_S - self.loop.time(), self._answered
        waits = answered is not None and not answered.response_complete
        behind = waits and (self._in_head or self.cycle is not answered)  # It has time until that answer has ended.
        if self._arrives and left <= 0 and not behind:
            self._end(b"408 Request Timeout")
        else:
            self._timer = self.loop.call_later(max(left, QUIET_S / 2), self._look)

    def _end(self, status: bytes) -> None:
        """Answer that a request is refused, and close. An answer under way is cut: it has no place for another."""
        if self.transport.is_closing():
            return
        under_way = self._answered
        if under_way is not None and under_way.response_started and not under_way.response_complete:
            self.transport.abort()
            return
        answered = not self._in_head and self.cycle is not None and self.cycle.response_complete
        if self._head and not answered:
            self.transport.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
        self.transport.close()


def server_config(app: ASGIApp) -> uvicorn.Config:
    """Return how uvicorn serves `app`."""
    return uvicorn.Config(
        app, http=Connection, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        proxy_headers=False, timeout_keep_alive=IDLE_S, timeout_graceful_shutdown=LEAVE_S,
    )  # fmt: skip


class _Resumed:
    """Callbacks of a parser that goes on behind headers that are known: it gets their framing again."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._known = connection, True
        self.on_body, self.on_message_complete = connection.on_body, connection.on_message_complete

    def on_message_begin(self) -> None:
        """Begin a later request."""
        if not self._known:
            self._connection.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take the path of a later request."""
        if not self._known:
            self._connection.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of a later request."""
        if not self._known:
            self._connection.on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the known headers, or those of a later request."""
        if not self._known:
            self._connection.on_headers_complete()
        self._known = False


def ends_with_connection(scope: Scope) -> bool:
    """Return whether an answer of unknown length ends with its connection: HTTP/1.0 has no chunks.

    It is called before the headers of the answer are sent.
    """
    if scope["http_version"] != "1.0":
        return False
    cycle: Any = scope["extensions"][TRANSPORT]["cycle"]()
    cycle.chunked_encoding = False
    return True


def begin_events(scope: Scope, settle: Callable[[], None], *, chunked: bool) -> None:
    """Note that events follow: between two of them, behind a call of `settle`, a comment may be sent."""
    known = scope["extensions"][TRANSPORT]
    known["sign"] = b"%x\r\n%b\r\n" % (len(_COMMENT), _COMMENT) if chunked else _COMMENT
    known["settle"] = settle


def end_events(scope: Scope, *, chunked: bool) -> bytes:
    """Note that the last event is written. Return the bytes behind it, which uvicorn leaves out then."""
    known: Any = scope["extensions"][TRANSPORT]
    known["sign"], known["cycle"]().chunked_encoding = b"", False
    return b"0\r\n\r\n" if chunked else b""


def transport_of(scope: Scope) -> asyncio.WriteTransport:
    """Return the transport of a request's connection."""
    found: asyncio.WriteTransport = scope["extensions"][TRANSPORT]["transport"]
    return found


def cut(scope: Scope) -> None:
    """Cut the connection of a request: a plain close would wait until the client has read."""
    known: Any = scope["extensions"][TRANSPORT]
    known["cycle"]().disconnected = True  # uvicorn learns it in a later turn, and would miss the end of the answer.
    known["transport"].abort()


@contextmanager
def watched(scope: Scope, lost: Callable[[], object]) -> Iterator[None]:
    """Call `lost` if the connection of a request is lost within the block, or was before it."""
    known: Any = scope["extensions"][TRANSPORT]
    known["watchers"].add(lost)
    try:
        if known["transport"].is_closing():
            lost()
        yield
    finally:
        known["watchers"].discard(lost)
