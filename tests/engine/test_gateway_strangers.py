"""Every verb and question of peers without a key that is allowed, and bytes of another peer that are sent again."""

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq
from monitor_helpers import Client, until
from ppengine.common.curve import be_client, make_keypair
from ppengine.gateway.audit import audit_file
from ppengine.protocol import frames
from ppengine.protocol.allowed_keys import AllowedKey, allow, revoke
from ppengine.protocol.control import Command, Failed, Fetch, Hello, Inspect, Ping, Pong, Refused, Replay
from ppengine.protocol.keys import keys_dir, own_keypair, public_key
from ppengine.protocol.verb_table import ROWS
from ppengine.protocol.verbs import Pause
from test_gateway_access import NAMED, QUIET_MS, STRANGER, VERBS, client, core_reports, gateway
from test_gateway_tcp import REMOTE, place  # noqa: F401 - a fixture

QUESTIONS = [Replay(nonce=1, after=0), Fetch(nonce=2, request="r"), Inspect(nonce=3, what="about"),
             Inspect(nonce=4, what="stacks"), Inspect(nonce=5, what="audit")]  # fmt: skip
TOO_MUCH = 120 * 1024 * 1024
"""Bytes of a message in many frames, each of them below the limit of one."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with gateway(tmp_path_factory.mktemp("config")) as made:
        yield made


def plain(kind):
    """Return what makes a socket of a peer that shows no key, by one of libzmq's other mechanisms."""

    def make(sock, config):
        if kind == "PLAIN":
            sock.plain_username, sock.plain_password = b"owner", b"secret"

    return make


def curve(pair, server_key=None):
    """Return what makes a socket of a peer with this keypair. `server_key` None: the engine's own."""

    def make(sock, config):
        be_client(sock, pair() if callable(pair) else pair, server_key or public_key(Path(config.run_dir)))

    return make


STRANGERS = {
    "no key": plain("NULL"), "a password": plain("PLAIN"), "an unknown key": curve(STRANGER),
    "an allowed key, for another server": curve(NAMED["admin"], make_keypair().public),
    "the own key, for another server": curve(lambda: own_keypair("client", make_keypair), make_keypair().public),
}  # fmt: skip


@contextlib.contextmanager
def peer(shared, make, name):
    config, context, _ = shared
    with context.socket(zmq.DEALER) as made:
        made.linger = 0
        make(made, config)
        made.connect(config.endpoint(name))
        yield made


def message(config, content):
    return [frames.encode(frames.header(config.id, config.epoch)), frames.encode(content)]


def send(sock, parts):
    """Send a message, unless libzmq has given the connection up after its refusal: a send would block for ever."""
    with contextlib.suppress(zmq.Again):
        sock.send_multipart(parts, zmq.DONTWAIT)


@pytest.mark.parametrize("stranger", STRANGERS)
def test_no_verb_and_no_question_of_a_stranger_gets_an_answer_or_an_effect(shared, stranger):
    config, _, core = shared
    audit = audit_file(Path(config.run_dir))
    before = audit.read_bytes()
    hello = Hello(proto_min=1, proto_max=1, client="t", user="eve")
    verbs = [Command(id=f"s-{name}", epoch=config.epoch, verb=VERBS[name], by="eve") for name in ROWS]
    with peer(shared, STRANGERS[stranger], "control") as control, peer(shared, STRANGERS[stranger], "bulk") as bulk:
        for content in (hello, *verbs, Ping(nonce=1)):
            send(control, message(config, content))
        for content in QUESTIONS:
            send(bulk, message(config, content))
        assert not control.poll(QUIET_MS) and not bulk.poll(0) and core.nothing(0)
    assert audit.read_bytes() == before, "not even a line of the audit log"


def test_a_key_that_is_revoked_while_connected_has_no_verb_and_no_question(shared):
    config, _, core = shared
    pair = make_keypair()
    allow(keys_dir() / "allowed", AllowedKey("admin", pair.public, "gone"))
    with client(shared, pair) as console:
        assert console.hello().role == "admin"
        core_reports(shared, console)
        console.bulk.send_multipart(message(config, QUESTIONS[2])[:1])
        assert console.hear(console.bulk).code == "PROTOCOL", "this connection has been let in as well"
        revoke(keys_dir() / "allowed", "gone")
        for name in ROWS:
            answer = console.ask(console.command(VERBS[name], f"late-{name}"))
            assert isinstance(answer, Refused) and (answer.id, answer.code) == (f"late-{name}", "DENIED")
        for question in QUESTIONS:
            answer = console.ask(question, socket=console.bulk)
            assert isinstance(answer, Failed) and (answer.nonce, answer.code) == (question.nonce, "DENIED")
    assert core.nothing(50) and b"late-" not in audit_file(Path(config.run_dir)).read_bytes()


@pytest.mark.parametrize("name", ["control", "bulk"])
@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_another_number_of_frames_is_answered_or_dropped_and_has_no_effect(shared, count, name):
    config, _, core = shared
    with client(shared, NAMED["admin"]) as console:
        console.hello()
        wire = {"control": console.control, "bulk": console.bulk}[name]
        content = console.command(Pause(), f"f-{count}") if name == "control" else QUESTIONS[2]
        wire.send_multipart([*message(config, content), b"", b"", b""][:count])
        answer = console.hear(wire)
        assert answer.code == "PROTOCOL" and f"{count} frame" in answer.text
        assert core.nothing(20) and isinstance(console.ask(Ping(nonce=1)), Pong)


def test_a_message_of_120_mb_in_many_frames_ends_nothing(tmp_path):
    with gateway(tmp_path) as made, client(made, NAMED["operator"]) as big, client(made) as own:
        big.hello()
        own.hello()
        part = bytes(15 * 1024 * 1024)
        big.control.send_multipart([part] * (TOO_MUCH // len(part)))
        assert isinstance(own.ask(Ping(nonce=1)), Pong)
        # Whether it was refused or dropped, its sender is served again.
        big.say(Ping(nonce=2))
        answers = [big.hear(timeout=60.0)]
        if not isinstance(answers[-1], Pong):
            answers.append(big.hear(timeout=60.0))
        assert answers[-1].nonce == 2 and made[2].nothing(20)


class Recorder:
    """Carries one connection to a port and keeps the bytes that the client sends, piece by piece."""

    def __init__(self, host, port):
        self.sent = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._target = host, port
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        near, _ = self._server.accept()
        far = socket.create_connection(self._target)
        for source, sink, keep in ((near, far, self.sent), (far, near, [])):
            threading.Thread(target=self._carry, args=(source, sink, keep), daemon=True).start()

    @staticmethod
    def _carry(source, sink, keep):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                keep.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def test_recorded_bytes_of_a_command_have_no_effect_again(place):  # noqa: F811
    config, context, core, address = place
    recorder = Recorder(address.host, address.port)
    with context.socket(zmq.DEALER) as control:
        control.linger = 0
        be_client(control, REMOTE, public_key(Path(config.run_dir)))
        control.connect(f"tcp://127.0.0.1:{recorder.port}")
        for content in (
            Hello(proto_min=1, proto_max=1, client="t", user="eve"),
            Command(id="once", epoch=config.epoch, verb=Pause(), by="eve"),
        ):
            control.send_multipart(message(config, content))
        assert (got := core.next()).id == "once" and isinstance(got, Command)
    recorded = list(recorder.sent)
    assert len(b"".join(recorded)) > 500, "greeting, handshake and two encrypted messages"
    audit = audit_file(Path(config.run_dir))
    before = audit.read_bytes().count(b"received")
    for pieces in (recorded, [b"".join(recorded)]):
        with socket.create_connection((address.host, address.port)) as again:
            for piece in pieces:
                with contextlib.suppress(OSError):
                    again.sendall(piece)
                time.sleep(0.05)
            assert core.nothing(300)
    assert audit.read_bytes().count(b"received") == before
    far = Client(context, config, (), REMOTE).open()
    assert far.hello().role == "operator"
    far.close()


def test_recorded_frames_in_a_new_session_are_answered_and_not_carried_out_again(shared):
    config, _, core = shared
    with client(shared, NAMED["operator"]) as first:
        first.hello()
        core_reports(shared, first)
        recorded = message(config, first.command(Pause(), "recorded"))
        first.control.send_multipart(recorded)
        while not isinstance(got := core.next(), Command) or got.id != "recorded":
            pass
        core.answer(Refused(id="recorded", code="BUSY", text="no"))
        assert first.hear().code == "BUSY"
    with client(shared, NAMED["operator"]) as second, client(shared, NAMED["admin"]) as thief:
        second.hello()
        second.control.send_multipart(recorded)
        assert (answer := second.hear()).code == "BUSY" and answer.id == "recorded", "the answer of the first"
        thief.hello()
        thief.control.send_multipart(recorded)
        assert thief.hear().code == "CONFLICT"
    until(lambda: core.nothing(50), 1.0)
    with client(shared, NAMED["operator"]) as late:
        late.hello()
        old = frames.header(config.id, config.epoch)
        fields = {"mono_ns": old.mono_ns - int(60e9), "wall": old.wall - 60.0}
        head = frames.Header(**({name: getattr(old, name) for name in old.__struct_fields__} | fields))
        late.say(late.command(Pause(), "minutes-ago"), head)
        assert late.hear().code == "EXPIRED" and core.nothing(20)
