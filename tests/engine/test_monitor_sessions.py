"""Sessions of consoles: who is counted, and what is told when one falls silent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from monitor_helpers import PRINCIPAL
from ppengine.gateway.consoles import Consoles
from ppengine.gateway.sessions import ATTACHED_S, Session, Sessions
from ppengine.protocol.control import Hello

HELLO = Hello(proto_min=1, proto_max=1, client="test", user="alice")


@pytest.mark.parametrize("pings", [0, 1])
def test_silent_console_gives_up_its_requests(pings: int) -> None:
    """Also one that was gone before its first ping."""
    told: list[tuple[str, list[str]]] = []

    def said(kind: str, session: Session) -> None:
        told.append((kind, list(session.requests)))

    sessions = Sessions(said)
    session = sessions.hello(b"console", HELLO, 0.0, PRINCIPAL)
    for _ in range(pings):
        sessions.ping(b"console", 0.0)
    session.requests = ["r-1"]
    assert sessions.count(ATTACHED_S) == pings
    assert sessions.count(ATTACHED_S + 1) == 0
    assert sessions.count(ATTACHED_S + 2) == 0
    assert told == [("attached", [])] * pings + [("detached", ["r-1"])]


def test_who_says_goodbye_is_gone_with_its_requests_at_once_and_once() -> None:
    told: list[tuple[str, list[str]]] = []
    sessions = Sessions(lambda kind, session: told.append((kind, list(session.requests))))
    sessions.hello(b"console", HELLO, 0.0, PRINCIPAL).requests = ["r-1"]
    sessions.hello(b"verb", HELLO, 0.0, PRINCIPAL)
    sessions.ping(b"console", 0.0)
    for client in (b"console", b"console", b"verb", b"stranger"):
        sessions.goodbye(client, 0.0)
    assert sessions.count(0.0) == 0
    session = sessions.get(b"console")
    assert session is not None
    session.requests = ["r-2"]  # accepted after it had left
    assert sessions.count(0.0) == sessions.count(ATTACHED_S + 1) == 0
    assert told == [("attached", ["r-1"]), ("detached", ["r-1"]), ("detached", ["r-2"])]
    assert sessions.count(100.0) == 0 and sessions.get(b"verb") is None, "and forgotten after a minute"


def test_who_is_only_passing_is_neither_counted_nor_told_of() -> None:
    told: list[str] = []
    sessions = Sessions(lambda kind, session: told.append(f"{kind} {session.user}"))
    sessions.hello(b"console", HELLO, 0.0, PRINCIPAL)
    sessions.hello(b"probe", msgspec.structs.replace(HELLO, user="bob", passing=True), 0.0, PRINCIPAL)
    for client in (b"probe", b"console"):
        sessions.ping(client, 0.0)
    assert sessions.count(1.0) == 1
    assert sessions.count(ATTACHED_S + 1) == 0
    assert told == ["attached alice", "detached alice"]


@pytest.mark.parametrize("passing", [False, True])
def test_the_end_of_a_passing_client_aborts_its_requests_and_is_no_event_of_a_console(passing: bool) -> None:
    events: list[tuple[str, str]] = []
    aborted: list[list[str]] = []
    consoles = SimpleNamespace(
        _events=SimpleNamespace(say=lambda kind, text, by: events.append((kind, text))),
        _engine=SimpleNamespace(abort=aborted.append),
    )
    sessions = Sessions(lambda change, session: Consoles._on_session(cast(Consoles, consoles), change, session))
    hello = msgspec.structs.replace(HELLO, passing=passing)
    sessions.hello(b"submit", hello, 0.0, PRINCIPAL).requests = ["r-1"]
    sessions.goodbye(b"submit", 0.0)
    client = "client" if passing else "console"
    assert aborted == [["r-1"]]
    assert [kind for kind, _ in events] == ["console.detached"] * (not passing) + ["request.abort_on_detach"]
    assert events[-1][1] == f"aborted with the {client} of alice: r-1"
