"""Readiness and watchdog of a service manager: the datagrams that it gets, from a supervisor over stand-ins."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Engine
from ppengine.supervisor.service_manager import NAMES, ServiceManager


class Manager:
    """The other end: what arrives on its socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.settimeout(30.0)
        self.heard: list[str] = []

    def until(self, word: str) -> list[str]:
        """Return all that arrived up to the first message that has `word`."""
        while not self.heard or word not in self.heard[-1]:
            self.heard.append(self._socket.recv(4096).decode())
        return self.heard

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["file", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "file" else f"@ppconsole-{time.monotonic_ns()}"
    made = Manager(address)
    yield made
    made.close()


def test_an_engine_is_ready_when_it_serves_and_feeds_the_watchdog(manager: Manager, tmp_path: Path) -> None:
    env = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "300000", "WATCHDOG_PID": "1"}
    env["STANDIN_REPORTS"] = str(tmp_path / "reports")  # Without it the stand-in of the gateway ends, five times.
    engine = Engine(tmp_path / "run", ["standins.supervisor", "twin", "2"], env)
    try:
        assert "STATUS=serving twin" in manager.until("READY=1")[-1]
        for _ in range(3):
            manager.heard.append("")
            manager.until("WATCHDOG=1")
        for pid in engine.find_processes(5).values():
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            assert not any(name.encode() in environ for name in NAMES), "a child cannot speak for the engine"
        engine.process.send_signal(signal.SIGTERM)
        assert "STATUS=SIGTERM received" in manager.until("STOPPING=1")[-1]
        assert engine.wait(15) == 0
    finally:
        engine.end()


def test_without_a_manager_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "socket")
    for environ in ({}, {"NOTIFY_SOCKET": "relative", "WATCHDOG_USEC": "1"}):
        manager = ServiceManager(environ)
        manager.ready("x")
        manager.alive()
        manager.close()


def test_a_manager_that_is_gone_or_does_not_read_costs_nothing(tmp_path: Path) -> None:
    gone = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "nothing")})
    gone.ready("x")
    other = Manager(str(tmp_path / "full"))
    full = ServiceManager({"NOTIFY_SOCKET": other.address})
    began = time.monotonic()
    for _ in range(2_000):
        full.ready("x" * 100)
    assert time.monotonic() - began < 5
    other.close()
