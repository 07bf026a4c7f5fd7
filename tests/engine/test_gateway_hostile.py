"""Consoles that misbehave: garbage, too many frames, readers that do not read. The engine's side must not notice."""

import os
import random
import time
from pathlib import Path

import pytest
import zmq
from monitor_helpers import TRIES, Client, FakeCore, make_config, remove, sample, started, until
from ppengine.common import procfs
from ppengine.common.curve import be_client, make_keypair
from ppengine.protocol import frames
from ppengine.protocol.control import Failed, Ping, Pong, Refused
from ppengine.protocol.keys import own_keypair, public_key

GATEWAY = "ppengine.gateway"


@pytest.fixture
def place():
    """Yield (config, context, core, gateway process)."""
    config = make_config()
    with zmq.Context() as context:
        core = FakeCore(context, config)
        with started(GATEWAY, config) as (process, _):
            until(lambda: Path(config.run_dir, "bulk").exists(), 30.0)
            core.report()
            yield config, context, core, process
            core.close()
    remove(config)


@pytest.fixture
def client(place):
    config, context, _, _ = place
    made = Client(context, config, (frames.TOPIC_SNAPSHOT,)).open()
    made.hello()
    yield made
    made.close()


def encrypted(socket, config):
    be_client(socket, own_keypair("client", make_keypair), public_key(Path(config.run_dir)))


def rss(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_garbage_of_every_shape_is_dropped_and_the_gateway_lives(place, client):
    chance = random.Random(7)
    head = frames.encode(frames.header("x", "y"))
    for _ in range(500):
        parts = [chance.randbytes(chance.randint(0, 60)) for _ in range(chance.randint(1, 5))]
        chance.choice([client.control, client.bulk]).send_multipart(parts)
    client.control.send_multipart([b"\x91" * 100_000, b"\x91" * 100_000])
    assert isinstance(client.ask(Ping(nonce=1)), Pong)
    assert place[3].poll() is None
    for count in (1, 3, 5):
        client.control.send_multipart([head] * count)
        answer = client.hear()
        assert isinstance(answer, Refused) and answer.code == "PROTOCOL" and f"{count} frames" in answer.text
    client.bulk.send_multipart([head, b"\xc1"])
    answer = client.hear(client.bulk)
    assert isinstance(answer, Failed) and answer.code == "PROTOCOL"


def test_an_oversized_frame_costs_its_sender_the_connection(place, client):
    config, context, _, process = place
    before = rss(process.pid)
    with context.socket(zmq.DEALER) as bad:
        bad.linger = 0
        encrypted(bad, config)
        bad.connect(config.endpoint("control"))
        bad.send_multipart([b"h", bytes(frames.MAX_FRAME_BYTES + 1)])
        assert not bad.poll(300)
    assert isinstance(client.ask(Ping(nonce=1)), Pong)
    assert rss(process.pid) - before < 8 * 1024 * 1024


def test_garbage_on_the_private_sockets(place, client):
    _, _, core, process = place
    for body in (b"", b"\xc1", b"\x91" * 100_000):
        core.collect.send(body)
        core.collect.send_multipart([body, body])
    core.agent_report(sample(0))
    until(lambda: client.snapshot().stages[0].state == "idle")
    assert process.poll() is None


def served_s(gateway):
    """Return the seconds so far in which neither this process nor the gateway waited for a core of a busy host."""
    waited = [procfs.threads_waited_ns(pid) or 0 for pid in (gateway, os.getpid())]
    return time.monotonic() - sum(waited) / 1e9


def test_readers_that_do_not_read_cost_nothing(place, client):
    config, context, core, process = place
    stalled = []
    try:
        for _ in range(10):
            socket = context.socket(zmq.SUB)
            socket.linger = 0
            socket.rcvhwm = 1
            socket.subscribe(b"")
            encrypted(socket, config)
            socket.connect(config.endpoint("state"))
            stalled.append(socket)
        talker = Client(context, config).open()
        talker.hello()
        client.snapshot()
        before = rss(process.pid)
        # Each is 200 kB: what waits for ten stalled readers would be 80 MB if it were not bounded.
        timeline = [[3, 1, 2.0, 3.0]] * 6000
        for _ in range(TRIES):
            gaps, last = [], served_s(process.pid)
            for _ in range(40):
                core.agent_report(sample(0, timeline=timeline))
                core.report()
                talker.say(Ping(nonce=1))
                client.snapshot()
                now = served_s(process.pid)
                gaps.append(now - last)
                last = now
            if sorted(gaps)[len(gaps) // 2] < 0.2 and max(gaps) < 1.0:
                break
        assert sorted(gaps)[len(gaps) // 2] < 0.2 and max(gaps) < 1.0
        assert rss(process.pid) - before < 40 * 1024 * 1024
        assert isinstance(client.ask(Ping(nonce=2)), Pong)
        talker.close()
    finally:
        for socket in stalled:
            socket.close()


def test_a_flood_of_pings_does_not_stop_the_snapshots(place, client):
    config, context, _, _ = place
    flood = Client(context, config).open()
    flood.hello()
    head = [frames.encode(frames.header(config.id, config.epoch)), frames.encode(Ping(nonce=1))]
    tries = []
    while len(tries) < TRIES and max(tries, default=0) < 8:
        end, seen = time.monotonic() + 1.5, 0
        while time.monotonic() < end:
            for _ in range(50):
                try:
                    flood.control.send_multipart(head, zmq.NOBLOCK)
                except zmq.Again:
                    break
            while client.state.poll(0):
                seen += client.published()[0] == frames.TOPIC_SNAPSHOT
        tries.append(seen)
    flood.close()
    assert max(tries) >= 8, tries
