"""Sessions of consoles by routing id, from Hello to Goodbye, or to ten seconds without a ping."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from ppengine.gateway.keyring import Principal
from ppengine.protocol import frames
from ppengine.protocol.control import Hello
from ppengine.protocol.frames import Header
from ppengine.protocol.reports import Attended
from ppengine.protocol.verb_table import Role

ATTACHED_S = 10.0
FORGET_S = 3600.0
"""Seconds after its last ping in which a session may still send commands."""
_LINGERS_S = 60.0
"""Seconds for which a session is kept after its Goodbye."""
MOST, OF_KEY_MOST = 10_000, 1000
"""Sessions in all, and of one key; the oldest of them makes room."""
_NAME_MOST = 64
_EXPECTED = Principal("", "", "operator")
"""Principal of a console that has not come to this gateway yet: its key is not known."""


class Session(msgspec.Struct):
    """One console. It is `attached` from its first ping: a one-off verb says Hello and never pings.

    A `passing` console never is attached.
    """

    client: bytes
    user: str
    program: str
    principal: Principal
    """Owner of its key, with the role that the key has now."""
    seen: float
    """Time of the last sign of life, in monotonic seconds."""
    read_only: bool = False
    proto: int = frames.PROTOCOL
    """Protocol version that both sides speak."""
    address: str = ""
    """Address of a console on another host; empty: it shares the clocks of this one."""
    clock_ns: int | None = None
    """Least difference of this host's monotonic clock to that of a console elsewhere: that message was fastest."""
    passing: bool = False
    console: str = ""
    """Name of the console, which it keeps when its link breaks; empty: it has none."""
    attached: bool = False
    requests: list[str] = []
    """Requests that are aborted when the console detaches."""

    @property
    def role(self) -> Role:
        """Rights of its commands."""
        return "viewer" if self.read_only else self.principal.role

    def age_s(self, head: Header) -> float:
        """Return the age of a message in seconds; one from elsewhere is compared with the fastest so far."""
        behind_ns = time.monotonic_ns() - head.mono_ns
        if not self.address:
            # The wall clock continues during a suspend, the monotonic one does not jump: the older age counts.
            return max(time.time() - head.wall, behind_ns / 1e9)
        self.clock_ns = behind_ns if self.clock_ns is None else min(self.clock_ns, behind_ns)
        return (behind_ns - self.clock_ns) / 1e9


class Sessions:
    """All sessions. `said(kind, session)` is called for `attached` and `detached`."""

    def __init__(self, said: Callable[[str, Session], None]) -> None:
        self._said = said
        self._sessions: dict[bytes, Session] = {}

    def hello(self, client: bytes, hello: Hello, now: float, principal: Principal, address: str = "") -> Session:
        """Open or renew the session of `client`."""
        known = self._sessions.pop(client, None)
        user, program = hello.user[:_NAME_MOST] or "unknown", hello.client[:_NAME_MOST]
        session = Session(
            client=client, user=user, program=program, principal=principal, seen=now, passing=hello.passing,
            console=hello.console[:_NAME_MOST], read_only=hello.read_only, address=address,
            proto=min(frames.PROTOCOL, hello.proto_max),
        )  # fmt: skip
        # A console that comes back after its link broke has another routing id.
        before = self.of_console(session.console) if known is None else None
        if before is not None and before.user == user and before.principal.key in ("", principal.key):
            session.attached, session.requests = before.attached, before.requests
            del self._sessions[before.client]
        if known is not None and known.user == user and known.principal.key == principal.key:
            session.attached, session.requests = known.attached, known.requests
        elif known is not None and known.principal.key != principal.key:
            self._leave(known)
        self._sessions[client] = session
        self._make_room(principal.key)
        return session

    def _make_room(self, key: str) -> None:
        """Drop the oldest session of a key that has too many, so that it costs no other key; then of all."""
        if len(self._sessions) <= OF_KEY_MOST:
            return
        own = [one for one in self._sessions.values() if one.principal.key == key]
        surplus = own[0] if len(own) > OF_KEY_MOST else None
        if surplus is None and len(self._sessions) > MOST:
            surplus = next(iter(self._sessions.values()))
        if surplus is not None:
            self._leave(surplus)
            del self._sessions[surplus.client]

    def expect(self, attended: Iterable[Attended], now: float) -> None:
        """Note requests of consoles that were attached to another gateway: each has ten seconds to come back."""
        for one in attended:
            session = self.of_console(one.console)
            if session is None:
                client = f"console {one.console}".encode()
                session = Session(
                    client=client, user=one.user, program="it did not come back", principal=_EXPECTED, seen=now,
                    console=one.console,
                )  # fmt: skip
                self._sessions[client] = session
            if one.request not in session.requests:
                session.requests = [*session.requests, one.request]

    def of_console(self, console: str) -> Session | None:
        """Return the session of a console by its name."""
        if not console:
            return None
        return next((one for one in self._sessions.values() if one.console == console), None)

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
