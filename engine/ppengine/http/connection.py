"""Connections of the HTTP server, to which an answer may write chunks by itself."""

from __future__ import annotations

import asyncio

from starlette.types import Scope
from typing_extensions import override
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

TRANSPORT = "ppengine.transport"
"""Name of the extension of a scope."""


class Connection(HttpToolsProtocol):
    """uvicorn's connection; the scope of a request has its transport.

    The way of an event through ASGI took as long as its system call: three wrappers, a message and a header each.
    """

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {TRANSPORT: {"transport": self.transport}}


def transport_of(scope: Scope) -> asyncio.WriteTransport:
    """Return the transport of a request's connection."""
    found: asyncio.WriteTransport = scope["extensions"][TRANSPORT]["transport"]
    return found
