"""Answers that take time: they end when their client leaves, and their requests with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ppengine.http.answer_forms import Answer
from ppengine.http.api_errors import ApiError
from ppengine.http.client_stats import Call
from ppengine.http.connection import begin_events, cut, end_events, ends_with_connection, transport_of, watched
from ppengine.http.event_stream import EventStream, all_parts
from ppengine.http.generation import Generation, Part

BODY_MOST = 16 * 2**20
"""Most bytes of a request's body."""
DROPPED_MOST = 2**26
"""Bytes of a body that are read, though it is refused, so that its client reads the answer."""
BODIES_MOST = 2**27
"""Bytes of all bodies that are being read, beyond which no long one is read on."""
SHORT_BODY = 65_536
"""Bytes of a body that is always read."""
INLINE_SIZE = 4096
"""Tokens and log-probabilities of an answer; one that has more is encoded on a thread: some 5 ms here."""
_JSON = "application/json"


def json_response(message: msgspec.Struct, status: int = 200) -> Response:
    """Return an answer in JSON."""
    return Response(msgspec.json.encode(message), status, media_type=_JSON)


def error_response(error: ApiError, body: Callable[[ApiError], bytes] = ApiError.encode) -> Response:
    """Return an error, in OpenAI's form without another `body`."""
    return Response(body(error), error.status, error.headers, _JSON)


class BodyReader:
    """Reads the bodies of requests, with a bound for all of them."""

    def __init__(self) -> None:
        self.held = 0
        """Bytes of the bodies that are being read."""

    async def read(self, request: Request) -> bytes:
        """Return the body of a request. Raises ApiError once it, or all together, are too long."""
        size, kept, pieces = 0, 0, list[bytes]()
        _check_headers(headers_of(request))
        try:
            async for piece in request.stream():
                size += len(piece)
                if size > BODY_MOST:
                    # A client that still sends when its connection is closed gets a reset in place of the answer.
                    self.held, kept = self.held - kept, 0
                    pieces.clear()
                    if size > DROPPED_MOST:
                        break
                    continue
                self.held, kept = self.held + len(piece), kept + len(piece)
                if self.held > BODIES_MOST and size > SHORT_BODY:
                    raise ApiError(
                        429, "rate_limit_error", "too many long bodies come at once; try again", retry_after_s=1
                    )
                pieces.append(piece)
        finally:
            self.held -= kept
        if size > BODY_MOST:
            raise _too_long()
        return b"".join(pieces)


def headers_of(request: Request) -> dict[str, str]:
    """Return the headers of a request, the first of each name. Starlette searches all of them for each."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(request.scope["headers"])}


def _check_headers(headers: Mapping[str, str]) -> None:
    """Raise ApiError for a body that need not be read: its headers say that it is too long, or compressed."""
    coding = headers.get("content-encoding", "")
    if coding.lower() not in ("", "identity"):
        text = f"the body has the content-encoding {coding[:40]}; send it without one"
        raise ApiError(415, "invalid_request_error", text, code="unsupported_content_encoding")
    waits = "expect" in headers
    if int(headers.get("content-length", 0)) > (BODY_MOST if waits else DROPPED_MOST):
        error = _too_long()
        if waits:
            # It will not send the body for which the parser waits.
            error.more_headers["connection"] = "close"
        raise error


def _too_long() -> ApiError:
    text = f"the body has more than {BODY_MOST} bytes, the most that is taken"
    return ApiError(413, "invalid_request_error", text)


class GenerationResponse(Response):
    """The answer to a request whose generations run, as events or as one body."""

    def __init__(
        self, name: str, answer: Answer, generations: Sequence[Generation], call: Call, *, events: bool
    ) -> None:
        super().__init__()
        self._name, self._answer, self._generations = name, answer, generations
        self._events, self._call, self._status = events, call, 200
        self.more_headers: dict[str, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; abort the generations if the client leaves before its end, or the call is closed."""
        task, leaving, left = asyncio.current_task(), False, False
        assert task is not None, "the server runs each request as a task"

        def leave() -> None:
            nonlocal leaving
            if not leaving:
                leaving = True
                task.cancel()

        self._call.on_close = leave
        try:
            with watched(scope, leave):
                if leaving:
                    await asyncio.sleep(0)  # It ends here: a whole answer that is there waits for nothing.
                await (self._send_events(scope, send) if self._events else self._send_whole(scope, send))
        except asyncio.CancelledError:
            left = not self._call.closed
            # The server may have cancelled the task, too.
            if not leaving or task.uncancel():
                raise
        except Exception:
            self._status = 500
            raise
        finally:
            self._call.end(self._status, left=left)
            for generation in self._generations:
                generation.leave()
            if self._call.closed:
                cut(scope)

    async def _send_whole(self, scope: Scope, send: Send) -> None:
        try:
            parts = await all_parts(self._generations, self._call)
            if sum(one.size for one in self._generations) > INLINE_SIZE:
                response = await asyncio.to_thread(self._whole, parts)
            else:
                response = self._whole(parts)
        except ApiError as error:
            response, self._status = error_response(error, self._answer.refusal), error.status
        response.headers.update({"x-request-id": self._name, **self.more_headers})
        await response(scope, _nothing, send)

    def _whole(self, parts: list[list[Part]]) -> Response:
        return json_response(self._answer.whole(parts))

    async def _send_events(self, scope: Scope, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"), (b"x-request-id", self._name.encode()),
            *((name.encode(), value.encode()) for name, value in self.more_headers.items()),
        ]  # fmt: skip
        chunked = not ends_with_connection(scope)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        # The first stream alone may send past the transport.
        begin_events(scope, self._generations[0].followed.settle, chunked=chunked)
        stream = EventStream(
            self._answer, self._generations, self._call, transport_of(scope), chunked=chunked,
            close=partial(end_events, scope, chunked=chunked),
        )  # fmt: skip
        error = await stream.run(send)
        self._status = 200 if error is None else error.status
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _nothing() -> dict[str, str]:
    """Receive nothing: a body that is sent at once reads no message."""
    raise AssertionError("a plain response receives nothing")
