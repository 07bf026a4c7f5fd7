"""Names by which a port without keys may be called. A page of a stranger has a domain of its own.

Such a page can have its domain resolve to 127.0.0.1 later (DNS rebinding). Its browser takes the port for the page's
own server then, and shows the page all answers. The `Host` header still has the domain.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from ppengine.http.api_errors import ApiError
from ppengine.http.generation_response import error_response
from ppengine.protocol.error_text import shown

_LOCAL = (".localhost", ".internal")
"""Ends of names that no stranger can register; `.internal` is that of Docker's hosts."""


class HostNames:
    """Refuses requests to other names with status 403; `origins` are those of `http.allowed_origins`."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._known = {urlsplit(one).hostname for one in origins}
        self._seen: set[bytes] = set()
        """Values of the header that are right; a client sends the same one each time."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        for name, value in scope.get("headers", ()):
            if name == b"host" and value not in self._seen:
                if not self._takes(host := _name(value.decode("latin-1"))):
                    await _refusal(host)(scope, receive, send)
                    return
                if len(self._seen) < 64:
                    self._seen.add(value)
        await self._app(scope, receive, send)

    def _takes(self, host: str) -> bool:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return "." not in host or host.endswith(_LOCAL) or host in self._known
        return True


def _name(host: str) -> str:
    """Return the name or address in a `Host` header, without its port."""
    end = host.find("]") if host.startswith("[") else -1
    name = host[1:end] if end > 0 else host.partition(":")[0]
    return name.strip().rstrip(".").lower()


def _refusal(host: str) -> ASGIApp:
    text = f"without API keys, this port is not reached as {shown(host)}"
    right = "use 127.0.0.1 or localhost, set an API key, or add its origin to http.allowed_origins"
    return error_response(ApiError(403, "invalid_request_error", f"{text}; {right}", code="unknown_host"))
