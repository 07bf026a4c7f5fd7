"""The port of an engine: clocks of other hosts, peers that waste connections, and a slow link."""

import asyncio
import itertools
import random
import socket
import time
from pathlib import Path

import pytest
import zmq
from monitor_helpers import Client, FakeCore, make_config, remove, started, until
from ppconsole.link import attachment
from ppconsole.link.contexts import remote_record
from ppconsole.link.engine_link import EngineLink
from ppconsole.link.far_past import FarPast
from ppconsole.link.source import AccessDenied
from ppengine.common.config import ConfigError, Profile
from ppengine.common.curve import be_client, make_keypair
from ppengine.common.profile_sections import ConsoleConfig, ModelConfig
from ppengine.protocol import frames
from ppengine.protocol.allowed_keys import AllowedKey, allow, revoke
from ppengine.protocol.control import Command, Hello, Ping, Pong, Refused
from ppengine.protocol.kept_files import engine_folder
from ppengine.protocol.keys import keys_dir, public_key
from ppengine.protocol.recording import LinkState
from ppengine.protocol.snapshot import RequestInfo, Snapshot
from ppengine.protocol.tcp_address import check_listen, parse_address
from ppengine.protocol.verbs import Pause
from ppengine.supervisor.boot import check_keys
from slow_link import BYTES_S, Relay, free_port

REMOTE = make_keypair()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Yield (config, context, core, address) of a gateway that listens on the loopback interface."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    allow(keys_dir() / "allowed", AllowedKey("operator", REMOTE.public, "far"))
    address = parse_address(f"tcp://127.0.0.1:{free_port()}")
    config = make_config(listen=str(address))
    with zmq.Context() as context:
        core = FakeCore(context, config)
        with started("ppengine.gateway", config):
            reader = Client(context, config, (frames.TOPIC_SNAPSHOT,))
            until(lambda: Path(config.run_dir, "bulk").exists(), 30.0)
            reader.open()
            until(lambda: (core.report(), reader.snapshot())[1].engine.state == "serving", 30.0)
            reader.close()
            yield config, context, core, address
        core.close()
    remove(config)


class Far(Client):
    """A console that comes by TCP."""

    def __init__(self, place, pair=REMOTE, topics=()):
        config, context, _, self.address = place
        super().__init__(context, config, topics, pair)

    def open(self):
        server_key = public_key(Path(self.config.run_dir))
        for sock, name in ((self.control, "control"), (self.bulk, "bulk"), (self.state, "state")):
            be_client(sock, self._keypair, server_key)
            sock.connect(self.address.endpoint(name))
        return self


def shifted(config, seconds):
    """Return a header of a host whose clocks differ by `seconds`."""
    head = frames.header(config.id, config.epoch)
    fields = {"mono_ns": head.mono_ns + int(seconds * 1e9), "wall": head.wall + seconds}
    return frames.Header(**({name: getattr(head, name) for name in head.__struct_fields__} | fields))


@pytest.mark.parametrize("seconds", [-1e6, 0.0, 1e6])
def test_the_age_of_a_command_from_another_host_needs_no_common_clock(place, seconds):
    config, _, core, _ = place
    far = Far(place).open()
    far.say(Hello(proto_min=1, proto_max=1, client="t", user="eve"), shifted(config, seconds))
    assert far.hear().role == "operator"
    far.say(Ping(nonce=1), shifted(config, seconds))
    assert isinstance(far.hear(), Pong)
    far.say(far.command(Pause(), "now"), shifted(config, seconds))
    assert isinstance(message := core.next(), Command) and message.id == "now"
    far.say(far.command(Pause(), "old", ttl_ms=1000), shifted(config, seconds - 5.0))
    answer = far.hear()
    assert isinstance(answer, Refused) and answer.code == "EXPIRED" and core.nothing()
    far.close()


def test_a_revoked_key_is_cut_off_the_port_and_others_go_on(place):
    other = make_keypair()
    allow(keys_dir() / "allowed", AllowedKey("viewer", other.public, "other"))
    gone, stays = Far(place, REMOTE, (b"",)).open(), Far(place, other, (b"",)).open()
    for one in (gone, stays):
        one.hello()
        one.snapshot()
    revoke(keys_dir() / "allowed", "far")
    assert gone.ask(gone.command(Pause(), "late")).code == "DENIED"
    while gone.state.poll(0):
        gone.state.recv_multipart()
    assert not gone.state.poll(1200)
    before = time.time()
    until(lambda: stays.published()[1].wall > before, 5.0)
    gone.close()
    stays.close()


def test_idle_connections_and_slow_handshakes_cost_others_nothing(place):
    address = place[3]
    crowd = [socket.create_connection((address.host, address.port)) for _ in range(500)]
    try:
        for number, one in enumerate(crowd):
            # Half say nothing, half begin a greeting and never end it.
            if number % 2:
                one.send(b"\xff\x00\x00\x00\x00")
        far = Far(place, REMOTE, (frames.TOPIC_SNAPSHOT,)).open()
        begun = time.monotonic()
        far.hello()
        assert time.monotonic() - begun < 5.0 and far.snapshot().engine.state
        until(lambda: closed(crowd[0]) and closed(crowd[1]), 20.0, "connections without a key are closed")
        assert isinstance(far.ask(Ping(nonce=1)), Pong)
        far.close()
    finally:
        for one in crowd:
            one.close()


def closed(one):
    """Return whether the other side has closed a connection."""
    one.settimeout(0.05)
    try:
        while one.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


async def test_a_console_over_100_ms_and_1_mbit_follows(place):
    config, _, core, address = place
    seen, states = [], []

    def take(update):
        if isinstance(update, Snapshot):
            seen.append((time.monotonic(), update))
        elif isinstance(update, LinkState):
            states.append((update.state, update.text))

    ports = [(address.host, address.port + number) for number in range(3)]
    async with Relay(ports) as relay:
        near = parse_address(f"tcp://127.0.0.1:{relay.port}")
        link = EngineLink(remote_record(near, public_key(Path(config.run_dir))), slow=True)
        begun = time.monotonic()
        await link.start(take)
        try:
            welcome = await link.attached(60.0)
            attached_s = time.monotonic() - begun
            while time.monotonic() < begun + 8.0:
                core.report()
                await asyncio.sleep(0.1)
            asked = time.monotonic()
            detail = await link.inspect("about")
            asked_s = time.monotonic() - asked
        finally:
            await link.close()
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(seen)]
    print(f"attached in {attached_s:.2f} s, a question {asked_s:.2f} s, largest gap {max(gaps):.2f} s, {relay.bytes} B")
    assert welcome.role == "admin" and link.record.id == config.id and detail is not None
    assert len(seen) >= 4 and max(gaps) < 2.0 and attached_s < 5.0
    assert not [state for state in states if state[0] in ("lost", "stale")], states


def busy(count):
    """Return the rows of many requests."""
    return [
        RequestInfo(
            id=f"r-{number:06x}", owner=f"user-{number % 7}", state="running", age_s=number * 1.7, prompt_tokens=number,
            output_tokens=3 * number, blocks=number % 50, swap_blocks=0, computed_tokens=4 * number, revision=3,
        )
        for number in range(count)
    ]  # fmt: skip


async def test_the_snapshots_of_a_busy_engine_fit_a_slow_link(place):
    config, _, core, address = place
    seen, states = [], []

    def take(update):
        if isinstance(update, Snapshot):
            seen.append((time.monotonic(), update))
        elif isinstance(update, LinkState):
            states.append(update.state)

    rows = busy(600)
    async with Relay([(address.host, address.port + number) for number in range(3)]) as relay:
        near = parse_address(f"tcp://127.0.0.1:{relay.port}")
        link = EngineLink(remote_record(near, public_key(Path(config.run_dir))), slow=True)
        await link.start(take)
        try:
            await link.attached(60.0)
            begun = time.monotonic()
            while time.monotonic() < begun + 6.0:
                core.report(requests=rows, requests_total=len(rows))
                await asyncio.sleep(0.1)
        finally:
            await link.close()
    full = len(frames.encode(seen[-1][1]))
    print(f"{full} bytes a snapshot, {relay.bytes[True] / 6.0:.0f} bytes/s over the link")
    assert len(seen[-1][1].requests) == 600 and full > 1.2 * BYTES_S, "one a second would not fit as it is"
    assert relay.bytes[True] < 6.0 * BYTES_S / 2
    assert max(later[0] - earlier[0] for earlier, later in itertools.pairwise(seen)) < 2.0
    assert not [state for state in states if state in ("lost", "stale")], states


async def test_a_gateway_of_the_protocol_before_gets_the_topic_that_it_has(place, monkeypatch):
    """A console subscribes before it knows the version of the gateway."""
    monkeypatch.setattr(attachment, "_PACKED_SINCE", frames.PROTOCOL + 1)
    seen = []
    link = EngineLink(remote_record(place[3], public_key(Path(place[0].run_dir))), slow=True)
    await link.start(lambda update: seen.append(update) if isinstance(update, Snapshot) else None)
    try:
        await link.attached(60.0)
        until_s = time.monotonic() + 5.0
        while len(seen) < 2 and time.monotonic() < until_s:
            place[2].report()
            await asyncio.sleep(0.1)
        assert len(seen) >= 2
    finally:
        await link.close()


async def test_a_console_with_the_wrong_server_key_never_attaches(place):
    link = EngineLink(remote_record(place[3], make_keypair().public))
    await link.start(lambda update: None)
    try:
        with pytest.raises(Exception, match="not attached within"):
            await link.attached(1.5)
    finally:
        await link.close()


async def test_a_console_whose_key_is_not_allowed_hears_so_at_once(place, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "stranger"))
    record = remote_record(place[3], public_key(Path(place[0].run_dir)))
    link, begun = EngineLink(record), time.monotonic()
    await link.start(lambda update: None)
    try:
        with pytest.raises(AccessDenied, match=r"on its host: ppconsole key allow NAME [0-9a-f]{64} --role operator"):
            await link.attached(60.0)
        assert time.monotonic() - begun < 3.0
    finally:
        await link.close()


# --- what is refused before an engine starts ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("tcp://*:7400", "write it in full: tcp://0.0.0.0:PORT"), ("tcp://:7400", "write it in full"),
        ("tcp://10.0.0.1", "it must be tcp://HOST:PORT"), ("tcp://10.0.0.1:0", "a port from 1 to 65533"),
        ("tcp://10.0.0.1:65534", "a port from 1 to 65533"), ("ipc:///tmp/x", "it must be tcp://HOST:PORT"),
        ("tcp://example.org:7400", "must be an IP address of this one"), ("tcp://10.0.0.1:7400\n", "it must be"),
        ("tcp://999.0.0.1:7400", "must be an IP address"), ("", "it must be tcp"),
    ],
)  # fmt: skip
def test_an_address_that_cannot_be_listened_on(text, wrong):
    with pytest.raises(ValueError, match=wrong):
        check_listen(text)


@pytest.mark.parametrize(
    "text", ["tcp://127.0.0.1:7400", "tcp://localhost:7400", "tcp://[::1]:1", "tcp://127.8.8.8:65533"]
)
def test_loopback_needs_no_other_key(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    check_keys(profile(text))
    assert str(check_listen(text)) == text


@pytest.mark.parametrize("text", ["tcp://0.0.0.0:7400", "tcp://10.0.0.1:7400", "tcp://[::]:7400"])
def test_an_address_that_others_reach_needs_an_allowed_key(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"which other hosts can reach, and no key is allowed .* ppconsole key allow"):
        check_keys(profile(text))
    allow(keys_dir() / "allowed", AllowedKey("viewer", REMOTE.public, "far"))
    check_keys(profile(text))


def profile(listen):
    return Profile(name="t", model=ModelConfig(path="x"), console=ConsoleConfig(listen=listen))


def test_a_port_in_use_ends_the_gateway_with_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    port = free_port()
    config = make_config(listen=f"tcp://127.0.0.1:{port}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 1))
        taken.listen()
        with started("ppengine.gateway", config) as (process, _):
            assert process.wait(30) == 1
    remove(config)
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert lines == [f"error: the port of tcp://127.0.0.1:{port + 1} cannot be used: Address already in use"]


async def test_the_past_is_copied_over_a_slow_link_while_snapshots_go_on(place):
    """256 KiB take two seconds of the link."""
    config, _, core, address = place
    folder = engine_folder(config.id) / "history"
    folder.mkdir(parents=True, exist_ok=True)
    content = random.Random(1).randbytes(256 * 1024)
    (folder / "000000000000001.rec").write_bytes(content)
    seen, states, steps = [], [], []

    def take(update):
        if isinstance(update, Snapshot):
            seen.append(time.monotonic())
        elif isinstance(update, LinkState):
            states.append(update.state)

    async def report():
        while True:
            core.report()
            await asyncio.sleep(0.1)

    async with Relay([(address.host, address.port + number) for number in range(3)]) as relay:
        near = parse_address(f"tcp://127.0.0.1:{relay.port}")
        link = EngineLink(remote_record(near, public_key(Path(config.run_dir))), slow=True)
        await link.start(take)
        reporting = asyncio.create_task(report())
        try:
            await link.attached(60.0)
            begun = time.monotonic()
            copied = await FarPast(link).copy_history(lambda done, total: steps.append((time.monotonic(), done, total)))
            took = time.monotonic() - begun
        finally:
            reporting.cancel()
            await link.close()
    gaps = [later - earlier for earlier, later in itertools.pairwise(seen)]
    waits = [later[0] - earlier[0] for earlier, later in itertools.pairwise(steps)]
    print(f"copied in {took:.2f} s, {len(steps)} steps, longest {max(waits):.2f} s, snapshot gap {max(gaps):.2f} s")
    assert (copied.folder / "history" / "000000000000001.rec").read_bytes() == content
    assert took < 3 * len(content) / BYTES_S and max(gaps) < 2.0 and len(steps) >= 8
    assert not [state for state in states if state in ("lost", "stale")], states
