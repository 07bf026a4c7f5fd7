"""The ZAP handler of a live engine ends or hangs: no key is admitted until another one answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import zmq

pytest.importorskip("torch")

from engines import wait_until
from injected import Injector
from ppengine.common.config import load_profile
from ppengine.common.curve import be_client, make_keypair
from ppengine.drills.registry import FaultError
from ppengine.drills.tracer import Tracer
from ppengine.gateway.access import HUNG_S
from ppengine.protocol.tcp_address import parse_address
from serving import Served
from slow_link import free_port

BACK_S = HUNG_S + 15.0
"""Most seconds until consoles are served again: on a crowded machine a gateway takes some of them to start."""
CLOSED_S = 2.5
"""A handler that has ended is replaced within a second."""


class Port:
    """The port of an engine, as a console elsewhere with an allowed key meets it."""

    def __init__(self, engine: Served, address: str) -> None:
        self._endpoint = parse_address(address).endpoint("control")
        self._pair = make_keypair()
        self._server_key = engine.cli("key", "ls", "--json").json["server"]
        assert engine.cli("key", "allow", "hung-port-user", self._pair.public, "--role", "viewer").code == 0

    def admits(self, within_s: float) -> bool:
        """Return whether a new connection has ended its handshake in time."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            be_client(socket, self._pair, self._server_key)
            with socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
                socket.connect(self._endpoint)
                found = monitor.poll(int(within_s * 1e3)) != 0
                socket.disable_monitor()
        return found


@pytest.fixture(scope="module")
def injector(tmp_path_factory: pytest.TempPathFactory) -> Injector:
    return Injector(tmp_path_factory.mktemp("injected"))


@pytest.fixture(scope="module")
def engine(injector: Injector) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", injector.path)
        served = Served(load_profile("tiny"), "--set", f"console.listen=tcp://127.0.0.1:{free_port()}")
    with served:
        yield served


@pytest.fixture(scope="module")
def port(engine: Served) -> Port:
    return Port(engine, engine.record.address)


def handler_thread(pid: int, injector: Injector) -> int:
    """Return the thread of the handler in a gateway."""
    injector.plant(pid, "find_zap_handler")
    return int((injector.folder / f"{pid}.thread").read_text())


async def test_a_handler_that_ends_lets_nobody_in_and_is_replaced(
    engine: Served, port: Port, injector: Injector
) -> None:
    wait_until(lambda: port.admits(1.0), "the key is read")
    async with engine.operator() as op:
        await asyncio.to_thread(injector.plant, engine.pids["gateway"], "end_zap_handlers")
        log = engine.engine.run_dir / "gateway.log"

        def has_ended() -> bool:
            return "the ZAP handler had ended" in log.read_text()

        try:
            await asyncio.to_thread(wait_until, has_ended, "it has ended, by a question", 5.0)
            assert not await asyncio.to_thread(port.admits, CLOSED_S), "no new handshake is admitted"
            ended = time.time()
            await op.until(lambda picture: picture.sampled_at > ended, "a console that is attached goes on")
        finally:
            await asyncio.to_thread(injector.plant, engine.pids["gateway"], "uproot")
        wait_until(lambda: port.admits(1.0), "another handler answers")
        assert engine.cli("status").code == 0
        gateway = engine.pids["gateway"]
        engine.find_pids()
        assert engine.pids["gateway"] == gateway, "the gateway itself goes on"


async def test_a_hung_handler_lets_nobody_in_and_is_replaced(engine: Served, port: Port, injector: Injector) -> None:
    async with engine.operator() as op:
        await op.until(lambda picture: picture.engine.state == "serving", "a snapshot before")
        gone = engine.pids["gateway"]
        try:
            hold = Tracer(await asyncio.to_thread(handler_thread, gone, injector))
        except FaultError as error:
            pytest.skip(f"no thread can be traced here: {error}")
        begun = time.monotonic()
        try:
            assert not port.admits(1.0), "no new handshake is admitted"
            ran = engine.cli("status", "--timeout", "2")
            assert time.monotonic() - begun < HUNG_S and ran.code != 0, "no console can attach"
            wait_until(lambda: "has not answered for" in engine.said(), "the hang is noticed", BACK_S)
        finally:
            hold.detach()
        free = time.time()
        await op.until(lambda picture: picture.sampled_at > free, "the console is back by itself", BACK_S)
        wait_until(lambda: engine.cli("status").code == 0, "others get in again", BACK_S)
        took = time.monotonic() - begun
        engine.find_pids()
        assert engine.pids["gateway"] != gone
        assert [event for event in await op.heard() if event.kind == "gateway.ended"], "the end is an event"
        print(f"consoles are served again {took:.1f} s after the hang")
        assert port.admits(5.0), "the port, too"
        assert engine.cli("submit", "Once upon a time", "--max-tokens", "4").code == 0
