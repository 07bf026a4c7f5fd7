"""Who is attached: consoles by routing id, from Hello to Goodbye, or until they were not heard for ten seconds."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ppengine.gateway.roles import Role, authenticate
from ppengine.protocol.control import Hello

ATTACHED_S = 10.0
FORGET_S = 3600.0
"""A session that pings no more may still send commands for so long."""
_LINGERS_S = 60.0
"""What is known of one that said goodbye."""
MOST = 10_000
_NAME_MOST = 64


class Session(msgspec.Struct):
    """One console. `attached` from its first ping on: a one-off verb says Hello and never pings.

    One that is only `passing` never is.
    """

    client: bytes
    user: str
    program: str
    role: Role
    heard: float
    passing: bool = False
    attached: bool = False
    requests: list[str] = []
    """Requests to abort when it is gone."""


class Sessions:
    """All sessions. `said(kind, session)` is told of `attached` and `detached`."""

    def __init__(self, said: Callable[[str, Session], None]) -> None:
        self._said = said
        self._sessions: dict[bytes, Session] = {}

    def hello(self, client: bytes, hello: Hello, now: float) -> Session:
        """Open or renew the session of `client`."""
        known = self._sessions.pop(client, None)
        user, program = hello.user[:_NAME_MOST] or "unknown", hello.client[:_NAME_MOST]
        session = Session(
            client=client, user=user, program=program, role=authenticate(hello), heard=now, passing=hello.passing
        )
        if known is not None and known.user == user:
            session.attached, session.requests = known.attached, known.requests
        self._sessions[client] = session
        if len(self._sessions) > MOST:
            self._leave(next(iter(self._sessions.values())))
            del self._sessions[next(iter(self._sessions))]
        return session

    def ping(self, client: bytes, now: float) -> None:
        """Note a sign of life."""
        session = self._sessions.get(client)
        if session is None:
            return
        session.heard = now
        if not session.attached and not session.passing:
            session.attached = True
            self._said("attached", session)

    def goodbye(self, client: bytes, now: float) -> None:
        """Note that `client` leaves."""
        session = self._sessions.get(client)
        if session is not None:
            self._leave(session)
            # What the core accepts yet of its requests goes at the next count.
            session.heard = now - FORGET_S + _LINGERS_S

    def get(self, client: bytes) -> Session | None:
        """Return the session of `client`."""
        return self._sessions.get(client)

    def count(self, now: float) -> int:
        """Return how many are attached; let go of those that were not heard for ten seconds."""
        for client, session in list(self._sessions.items()):
            if (session.attached or session.requests) and now - session.heard > ATTACHED_S:
                self._leave(session)
            if now - session.heard > FORGET_S:
                del self._sessions[client]
        return sum(session.attached for session in self._sessions.values())

    def _leave(self, session: Session) -> None:
        # A console that was gone before its first ping may have left a request that goes with it.
        if session.attached or session.requests:
            self._said("detached", session)
        session.attached, session.requests = False, []
