"""Connections of one address: counted, limited before the handshake, and their failures logged with the address."""

import contextlib
import resource
import socket
import time

import pytest
import zmq
from monitor_helpers import make_config, remove, until
from ppengine.common.curve import CONSOLES, make_keypair
from ppengine.common.refusal_log import RefusalLog
from ppengine.common.zap import ENDPOINT, ZapHandler
from ppengine.gateway.connections import ADDRESS_MOST, Connections, group
from ppengine.gateway.gateway_sockets import Sockets
from ppengine.protocol import frames
from ppengine.protocol.control import Ping, Pong
from ppengine.protocol.tcp_address import parse_address
from test_gateway_tcp import REMOTE, Far, closed, free_port, place  # noqa: F401 - `place` is a fixture

MOST = 5


class Listening:
    """Bound sockets of an engine, with the reports of their connections."""

    def __init__(self, context):
        self.port = free_port()
        self.config = make_config(listen=str(parse_address(f"tcp://127.0.0.1:{self.port}")))
        self.lines = []
        self.connections = Connections(context, self.lines.append, MOST)
        self.sockets = Sockets(context, self.config, make_keypair(), self.connections)

    def connect(self, number=1, port=0, source="127.0.0.1"):
        made = [
            socket.create_connection(("127.0.0.1", self.port + port), source_address=(source, 0)) for _ in range(number)
        ]
        time.sleep(0.1)
        self.turn()
        return made

    def turn(self):
        for monitor, take in self.connections.monitors.items():
            while monitor.poll(0):
                take()

    def close(self):
        self.connections.close()
        self.sockets.close()
        remove(self.config)


@pytest.fixture
def listening():
    with zmq.Context() as context:
        made = Listening(context)
        yield made
        made.close()


def test_connections_above_the_limit_are_closed_and_room_comes_back(listening):
    crowd = [*listening.connect(2, port=0), *listening.connect(2, port=1), *listening.connect(MOST - 4, port=2)]
    assert not any(map(closed, crowd)) and not listening.lines
    surplus = listening.connect(3)
    assert all(map(closed, surplus)) and not any(map(closed, crowd))
    assert set(listening.lines) == {f"closed a connection of 127.0.0.1, which has {MOST} others"}
    other = listening.connect(MOST, source="127.0.0.2")
    assert not any(map(closed, other)), "another address has a limit of its own"
    for one in crowd[:2]:
        one.close()

    def room():
        (one,) = listening.connect()
        return not closed(one) and crowd.append(one) is None

    until(room, 5.0, "an end makes room")
    for one in (*crowd, *surplus, *other):
        one.close()
    until(lambda: (listening.turn(), not listening.connections._addresses)[1], 5.0, "nothing is left to count")
    assert not listening.connections._counts and not listening.connections._surplus


def test_a_socket_that_is_bound_again_counts_from_zero(listening):
    crowd = listening.connect(MOST, port=1)
    listening.sockets.reopen_state()
    time.sleep(0.1)
    listening.turn()
    assert all(map(closed, crowd))
    fresh = listening.connect(MOST, port=1)
    assert not any(map(closed, fresh)) and not listening.lines
    for one in (*crowd, *fresh):
        one.close()


def test_a_failed_handshake_is_reported_with_its_address(listening):
    (one,) = listening.connect(source="127.0.0.3")
    # A greeting of ZMTP 3.1 that asks for the mechanism PLAIN.
    one.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + bytes(32))
    until(lambda: (listening.turn(), listening.lines)[1], 5.0)
    assert listening.lines[0].startswith("handshake of 127.0.0.3 failed: ")
    one.close()


@pytest.mark.parametrize(
    ("address", "counted"),
    [
        ("10.0.0.7", "10.0.0.7"), ("::ffff:10.0.0.7", "10.0.0.7"), ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"), ("fe80::1%eth0", "fe80::/64"), ("::1", "::/64"),
    ],
)  # fmt: skip
def test_a_host_has_all_addresses_of_its_network(address, counted):
    assert group(address) == counted


def test_refusals_are_one_line_a_second(caplog, monkeypatch):
    import logging

    from ppengine.common import refusal_log

    now = [10.0]
    monkeypatch.setattr(refusal_log.time, "monotonic", lambda: now[0])
    say = RefusalLog(logging.getLogger("refusals"))
    for number in range(500):
        say(f"refused {number}")
    now[0] += 1.0
    say("refused 500")
    assert [record.getMessage() for record in caplog.records] == ["refused 0", "refused 500, and 499 others"]


@pytest.fixture
def descriptors():
    """Let this process open 4,000 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4000:
        pytest.skip(f"at most {hard} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4000), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Elsewhere(Far):
    """A console at another address of this host."""

    def open(self):
        super_connect = self.address.endpoint
        self.address = type("Address", (), {"endpoint": lambda _, name: _from("127.0.0.9", super_connect(name))})()
        return super().open()


def _from(source, endpoint):
    return endpoint.replace("tcp://", f"tcp://{source}:0;")


def test_two_thousand_connections_of_an_address_leave_room_for_others(place, descriptors):  # noqa: F811
    address = place[3]
    crowd = [socket.create_connection((address.host, address.port)) for _ in range(2000)]
    try:
        far = Elsewhere(place, REMOTE, (frames.TOPIC_SNAPSHOT,)).open()
        begun = time.monotonic()
        far.hello()
        assert time.monotonic() - begun < 5.0 and far.snapshot().engine.state
        time.sleep(0.5)
        gone = sum(map(quickly_closed, crowd))
        assert gone >= 2000 - ADDRESS_MOST, gone
        until(lambda: closed(crowd[0]) and closed(crowd[ADDRESS_MOST - 1]), 20.0, "those without a key follow")
        assert isinstance(far.ask(Ping(nonce=1)), Pong)
        far.close()
    finally:
        for one in crowd:
            one.close()
    near = Far(place, REMOTE).open()
    assert near.hello().role == "operator", "the address may connect again"
    near.close()


def quickly_closed(one):
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            while one.recv(4096):
                pass
        except OSError as error:
            if isinstance(error, BlockingIOError):
                raise
        return True
    return False


# --- a handler that hangs -----------------------------------------------------------------------------------


def test_a_handler_that_answers_is_not_hung_and_one_that_does_not_is():
    context = zmq.Context()
    handler = ZapHandler(context, {CONSOLES: lambda key: True})
    now = 100.0
    for _ in range(3):
        assert handler.hung_s(now) < 1.0
        until(lambda: handler._probe.poll(10), 5.0)
        now += 1.0
    handler.close_probe()
    context.term()
    # A socket that takes the question and never answers, as a thread that is stopped.
    with zmq.Context() as silent:
        endpoint = silent.socket(zmq.REP)
        endpoint.linger = 0
        endpoint.bind(ENDPOINT)
        handler._context, handler._probe = silent, None
        assert [handler.hung_s(now + seconds) for seconds in (0.0, 3.0, 6.0)] == [0.0, 3.0, 6.0]
        handler.close_probe()
        endpoint.close()


def test_reports_of_a_socket_that_is_left_block_nothing(listening):
    listening.connections.leave("state")
    with socket.create_connection(("127.0.0.1", listening.port + 1)):
        (one,) = listening.connect()
        until(lambda: listening.turn() or listening.connections._counts["127.0.0.1"] == 1, 10.0, "a connection is seen")
        one.close()
