"""The application: it calls the handler of a path, and answers by itself if there is none or if it fails."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ppengine.http.api_errors import ApiError
from ppengine.http.generation_response import error_response
from ppengine.http.messages_answer import error_body

log = logging.getLogger("ppengine.http")

ANTHROPIC = "/v1/messages"
"""Beginning of the paths whose errors are in Anthropic's form."""
Handler = Callable[[Request], Awaitable[Response]]
_METHODS = {"GET": ("GET", "HEAD"), "POST": ("POST",)}


class Paths:
    """An application (ASGI). A `/` at the end of a path changes nothing.

    A redirect to the path without it would name http:// behind a proxy with TLS. Starlette's own application took a
    fifth of the CPU of a request: it compares patterns one by one, and wraps each message three times.
    """

    def __init__(
        self, handlers: Mapping[str, tuple[str, Handler]], below: Mapping[str, tuple[str, Handler]] | None = None
    ) -> None:
        """`handlers`: methods and handlers by path; `below`: by the path that a name of any characters follows."""
        self._handlers, self._below = handlers, below or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        request = Request(scope, receive)
        try:
            response = await self._answer(request)
            await response(scope, receive, noting)
        except Exception:
            log.exception("%s %s failed", request.method, scope["path"][:80])
            if begun:
                raise  # The server cuts the connection.
            text = "the server failed at this request; its log has the reason"
            await _refusal(request, ApiError(500, "server_error", text))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        path = request.scope["path"]
        method, handler = self._found(request, path.removesuffix("/"))
        if handler is None:
            return self._unknown(request, path[:80])
        if request.method not in (methods := _METHODS[method]):
            text = f"{request.method} {path[:80]}: Method Not Allowed; use {method}"
            response = _refusal(request, ApiError(405, "invalid_request_error", text))
            response.headers["allow"] = ", ".join(methods)
            return response
        return await handler(request)

    def _found(self, request: Request, path: str) -> tuple[str, Handler | None]:
        if (found := self._handlers.get(path)) is not None:
            return found
        for above, found in self._below.items():
            if path.startswith(f"{above}/"):
                request.scope["path_params"] = {"name": path.removeprefix(f"{above}/")}
                return found
        return "", None

    def _unknown(self, request: Request, path: str) -> Response:
        """Answer an unknown path with the nearest one."""
        text = f"{request.method} {path}: Not Found"
        if near := difflib.get_close_matches(path, self._handlers, n=1, cutoff=0.7):
            text += f"; did you mean {near[0]}?"
        return _refusal(request, ApiError(404, "not_found_error", text))


def error_form(path: str) -> Callable[[ApiError], bytes]:
    """Return how the errors of a path are written."""
    return error_body if path.startswith(ANTHROPIC) else ApiError.encode


def _refusal(request: Request, error: ApiError) -> Response:
    return error_response(error, error_form(request.scope["path"]))
