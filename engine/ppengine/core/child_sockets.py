"""Sockets of the processes that work for the core alone: grammars, stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from ppengine.common.sockets import NOBLOCK, readable
from ppengine.core.engine import Engine
from ppengine.protocol.frames import MAX_FRAME_BYTES, Codec, ProtocolError
from ppengine.protocol.grammar_messages import FromGrammars
from ppengine.protocol.store_messages import FromStore

Router = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True)
class _Child:
    """One socket: the messages that it brings, and the part of the engine that takes them."""

    who: str
    """Its processes in words."""
    codec: Codec
    take: Callable[[Engine, bytes, Any], bool | None]
    """Takes a message; False: it calls for no turn yet."""
    take_malformed: Callable[[Engine, bytes, str], None] = lambda *_: None
    """Takes the fault of a message that cannot be decoded."""


_CHILDREN = {
    "grammar": _Child(
        "a grammar process",
        Codec(FromGrammars),
        lambda one, *what: one.on_grammars(*what),
        lambda one, *what: one.constraints.take_malformed(*what),
    ),
    "stores": _Child("a store", Codec(FromStore), lambda one, *what: one.tiers.take(*what)),
}


class ChildSockets:
    """One router socket a kind of process; each process has a routing id of its own."""

    def __init__(self, make: Callable[[int], Router]) -> None:
        self.routers = {name: make(zmq.ROUTER) for name in _CHILDREN}
        for router in self.routers.values():
            router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            # A restarted store connects under the name of its predecessor.
            router.setsockopt(zmq.ROUTER_HANDOVER, 1)

    def send(self, name: str, process: bytes, payload: bytes) -> None:
        """Send a message to the process with this routing id; without one it is dropped."""
        self.routers[name].send_multipart([process, payload], NOBLOCK)

    def drain(self, engine: Engine) -> bool:
        """Route all messages to the parts of the engine; return whether one calls for a turn."""
        news = False
        for name, child in _CHILDREN.items():
            router = self.routers[name]
            while readable(router):
                process, *frames = router.recv_multipart(NOBLOCK)
                try:
                    message = child.codec.decode(frames[-1])
                except ProtocolError as error:
                    engine.event("protocol.error", f"from {child.who}: {error}")
                    child.take_malformed(engine, process, str(error))
                    news = True
                else:
                    news = child.take(engine, process, message) is not False or news
        return news
