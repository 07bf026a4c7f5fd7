"""Sessions of consoles by routing id, from Hello to Goodbye, or to ten seconds without a ping."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from ppengine.gateway.roles import Role, authenticate
from ppengine.protocol.control import Hello
from ppengine.protocol.reports import Attended

ATTACHED_S = 10.0
FORGET_S = 3600.0
"""Seconds after its last ping in which a session may still send commands."""
_LINGERS_S = 60.0
"""Seconds for which a session is kept after its Goodbye."""
MOST = 10_000
_NAME_MOST = 64


class Session(msgspec.Struct):
    """One console. It is `attached` from its first ping: a one-off verb says Hello and never pings.

    A `passing` console never is attached.
    """

    client: bytes
    user: str
    program: str
    role: Role
    seen: float
    """Time of the last sign of life, in monotonic seconds."""
    passing: bool = False
    console: str = ""
    """Name of the console, which it keeps when its link breaks; empty: it has none."""
    attached: bool = False
    requests: list[str] = []
    """Requests that are aborted when the console detaches."""


class Sessions:
    """All sessions. `said(kind, session)` is called for `attached` and `detached`."""

    def __init__(self, said: Callable[[str, Session], None]) -> None:
        self._said = said
        self._sessions: dict[bytes, Session] = {}

    def hello(self, client: bytes, hello: Hello, now: float) -> Session:
        """Open or renew the session of `client`."""
        known = self._sessions.pop(client, None)
        user, program = hello.user[:_NAME_MOST] or "unknown", hello.client[:_NAME_MOST]
        session = Session(
            client=client, user=user, program=program, role=authenticate(hello), seen=now, passing=hello.passing,
            console=hello.console[:_NAME_MOST],
        )  # fmt: skip
        # A console that comes back after its link broke has another routing id.
        before = self._of_console(session.console) if known is None else None
        if before is not None and before.user == user:
            session.attached, session.requests = before.attached, before.requests
            del self._sessions[before.client]
        if known is not None and known.user == user:
            session.attached, session.requests = known.attached, known.requests
        self._sessions[client] = session
        if len(self._sessions) > MOST:
            self._leave(next(iter(self._sessions.values())))
            del self._sessions[next(iter(self._sessions))]
        return session

    def expect(self, attended: Iterable[Attended], now: float) -> None:
        """Note requests of consoles that were attached to another gateway: each has ten seconds to come back."""
        for one in attended:
            session = self._of_console(one.console)
            if session is None:
                client = f"console {one.console}".encode()
                session = Session(
                    client=client, user=one.user, program="it did not come back", role="operator", seen=now,
                    console=one.console,
                )  # fmt: skip
                self._sessions[client] = session
            if one.request not in session.requests:
                session.requests = [*session.requests, one.request]

    def _of_console(self, console: str) -> Session | None:
        """Return the session of a console by its name."""
        return next((one for one in self._sessions.values() if console and one.console == console), None)

    def ping(self, client: bytes, now: float) -> bool:
        """Note a sign of life; return False for a console that has not said Hello to this gateway."""
        session = self._sessions.get(client)
        if session is None:
            return False
        session.seen = now
        if not session.attached and not session.passing:
            session.attached = True
            self._said("attached", session)
        return True

    def goodbye(self, client: bytes, now: float) -> None:
        """End the attachment of `client`."""
        session = self._sessions.get(client)
        if session is not None:
            self._leave(session)
            # Its requests that the core still accepts are aborted at the next count.
            session.seen = now - FORGET_S + _LINGERS_S

    def get(self, client: bytes) -> Session | None:
        """Return the session of `client`."""
        return self._sessions.get(client)

    def count(self, now: float) -> int:
        """Return the number of attached consoles; detach those without a ping for ten seconds."""
        for client, session in list(self._sessions.items()):
            if (session.attached or session.requests) and now - session.seen > ATTACHED_S:
                self._leave(session)
            if now - session.seen > FORGET_S:
                del self._sessions[client]
        return sum(session.attached for session in self._sessions.values())

    def _leave(self, session: Session) -> None:
        # A console that left before its first ping may have a request to abort.
        if session.attached or session.requests:
            self._said("detached", session)
        session.attached, session.requests = False, []
