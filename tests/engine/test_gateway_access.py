"""Who reaches a gateway, and for what: keys, roles, revocation, and a ZAP handler that fails."""

import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import get_args

import pytest
import zmq
from monitor_helpers import Client, FakeCore, make_config, remove, started, until
from ppengine.common.curve import CONSOLES, be_client, make_keypair
from ppengine.common.zap import ZapHandler
from ppengine.gateway.audit import Entry, audit_file
from ppengine.gateway.gateway_sockets import Sockets
from ppengine.gateway.past_desk import LIST_BYTES
from ppengine.gateway.rate_limits import BYTES_MOST, COMMANDS_MOST, QUESTIONS_MOST
from ppengine.protocol import frames
from ppengine.protocol.allowed_keys import AllowedKey, allow, revoke
from ppengine.protocol.control import (
    Command,
    Failed,
    Fetch,
    Hello,
    Inspect,
    Inspected,
    Ping,
    Pong,
    Refused,
    Replay,
    Welcome,
)
from ppengine.protocol.json_files import decode_json
from ppengine.protocol.keys import Keypair, keys_dir, own_keypair, public_key
from ppengine.protocol.past_files import ListPast, PastListed, PastPart, ReadPast
from ppengine.protocol.store_verbs import StoreAdd, StoreVerb
from ppengine.protocol.verb_table import ROWS, covers
from ppengine.protocol.verbs import (
    Abort,
    ClearFaults,
    Continue,
    Cordon,
    Drain,
    DrainClient,
    Fault,
    Kick,
    Lease,
    Limit,
    Many,
    Pause,
    Preempt,
    Priority,
    Release,
    RestartStage,
    Resume,
    SetCheck,
    SetMemory,
    Stop,
    Submit,
    SwapIn,
    SwapOut,
)

NAMED = {role: make_keypair() for role in ("viewer", "operator", "admin")}
STRANGER, GONE = make_keypair(), make_keypair()
VERBS = {
    "submit": Submit(prompt_token_ids=[1]), "preempt": Preempt(request="r"), "swap-out": SwapOut(request="r"),
    "swap-in": SwapIn(request="r"), "release": Release(request="r"), "priority": Priority(request="r", priority=1),
    "abort": Abort(request="r"), "many": Many(verbs=[Abort(request="r")]), "set-memory": SetMemory(utilization=0.5),
    "pause": Pause(), "resume": Resume(), "drain": Drain(), "stop": Stop(), "continue": Continue(stage=0),
    "check": SetCheck(check="finite"), "restart-stage": RestartStage(stage=0), "cordon": Cordon(stage=0),
    "fault": Fault(kind="sigstop"), "clear-faults": ClearFaults(), "lease": Lease(action="release"),
    "limit": Limit(client="ann", limit="8"), "kick": Kick(client="ann"), "drain-client": DrainClient(client="ann"),
    "store-add": StoreAdd(backend="b", kind="files", url="/kv"),
    **{verb.__struct_config__.tag: verb(backend="b") for verb in get_args(StoreVerb) if verb is not StoreAdd},
}  # fmt: skip
QUIET_MS = 400
"""Milliseconds without an answer after which a peer counts as refused; an allowed one has it within five."""


@contextmanager
def gateway(folder):
    """Yield (config, context, core) of a gateway with keys of three roles."""
    with pytest.MonkeyPatch.context() as patch, zmq.Context() as context:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        for role, pair in NAMED.items():
            allow(keys_dir() / "allowed", AllowedKey(role, pair.public, f"{role}-key"))
        config = make_config()
        core = FakeCore(context, config)
        with started("ppengine.gateway", config):
            until(lambda: Path(config.run_dir, "bulk").exists(), 30.0)
            reader = Client(context, config, (frames.TOPIC_SNAPSHOT,)).open()
            until(lambda: (core.report(), reader.snapshot())[1].engine.state == "serving", 30.0)
            reader.close()
            yield config, context, core
            core.close()
        remove(config)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with gateway(tmp_path_factory.mktemp("config")) as place:
        yield place


@pytest.fixture
def place(tmp_path):
    with gateway(tmp_path) as place:
        yield place


@contextmanager
def client(place, keypair=None, topics=()):
    made = Client(place[1], place[0], topics, keypair).open()
    try:
        yield made
    finally:
        made.close()


def core_reports(place, console):
    """Wait until the gateway has a report of the core: without a fresh one it forwards nothing."""
    until(lambda: (place[2].report(), console.ask(Ping(nonce=9)))[1].core_age_ms < 500.0, 10.0)


def refused(config, pair, server_key, name="control"):
    """Return whether the library reports that the other side refuses a key."""
    with zmq.Context() as context, context.socket(zmq.SUB if name == "state" else zmq.DEALER) as socket:
        socket.linger = 0
        be_client(socket, pair, server_key)
        with socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH) as monitor:
            socket.connect(config.endpoint(name))
            found = monitor.poll(5000) != 0
            socket.disable_monitor()
        return found


def send(socket, *parts):
    """Send, unless the other side has refused `socket` already: then it has no connection, and would wait for one."""
    with suppress(zmq.Again):
        socket.send_multipart(parts, zmq.NOBLOCK)


def ping(console):
    """Send a question to a gateway that may have refused the key."""
    head = frames.header(console.config.id, console.config.epoch)
    send(console.control, frames.encode(head), frames.encode(Ping(nonce=1)))


# --- handshakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["control", "bulk", "state"])
def test_a_peer_without_a_key_gets_no_byte(shared, name):
    config, context, _ = shared
    with context.socket(zmq.SUB if name == "state" else zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(config.endpoint(name))
        if name == "state":
            socket.subscribe(b"")
        else:
            hello = Hello(proto_min=1, proto_max=1, client="t", user="eve")
            send(socket, frames.encode(frames.header(config.id, config.epoch)), frames.encode(hello))
        assert not socket.poll(3 * QUIET_MS), "a snapshot is published each second at least"


def test_an_engine_with_another_key_is_not_talked_to(shared):
    config, context, _ = shared
    with context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        be_client(socket, own_keypair("client", make_keypair), make_keypair().public)
        socket.connect(config.endpoint("control"))
        send(socket, b"h", b"b")
        assert not socket.poll(QUIET_MS)


@pytest.mark.parametrize("name", ["control", "bulk", "state"])
def test_an_unknown_key_is_refused(shared, name):
    assert refused(shared[0], STRANGER, public_key(Path(shared[0].run_dir)), name)
    with client(shared, STRANGER, (b"",)) as stranger:
        ping(stranger)
        assert not stranger.control.poll(QUIET_MS) and not stranger.state.poll(0)


def test_a_public_key_without_its_secret_is_no_key(shared):
    thief = Keypair(NAMED["admin"].public, STRANGER.secret)
    with client(shared, thief) as mallory:
        ping(mallory)
        assert not mallory.control.poll(QUIET_MS)


# --- roles --------------------------------------------------------------------------------------------------


def test_every_verb_has_a_sample_here():
    assert set(VERBS) == set(ROWS)


@pytest.mark.parametrize("verb", ROWS)
@pytest.mark.parametrize("role", [*NAMED, "owner"])
def test_each_verb_needs_its_role(shared, role, verb):
    config, _, core = shared
    with client(shared, NAMED.get(role)) as console:
        assert console.hello().role == ("admin" if role == "owner" else role)
        core_reports(shared, console)
        identity = f"{role}-{verb}"
        console.say(console.command(VERBS[verb], identity, dry_run=True))
        allowed = covers("admin" if role == "owner" else role, ROWS[verb].role)
        if allowed and ROWS[verb].runs == "core":
            while not (isinstance(message := core.next(), Command) and message.id == identity):
                pass
            return
        answer = console.hear()
        by_role = answer.code == "DENIED" and f"{verb} needs {ROWS[verb].role}" in answer.text
        assert isinstance(answer, Refused) and by_role != allowed
        if not allowed:
            assert answer.text == f"key {role}-key is {role}, {verb} needs {ROWS[verb].role}: {verb} is refused"
            assert core.nothing(20)
    lines = [decode_json(line, Entry) for line in audit_file(Path(config.run_dir)).read_bytes().splitlines()]
    own = [line for line in lines if line.id == identity]
    assert [line.outcome for line in own] == ["received", "refused"]
    assert {line.principal for line in own} == {"owner" if role == "owner" else f"{role}-key"}


def test_a_read_only_console_of_an_admin_has_no_verbs(shared):
    with client(shared, NAMED["admin"]) as console:
        assert console.hello(read_only=True).role == "viewer"
        answer = console.ask(console.command(Pause(), "ro-1"))
        assert answer.code == "DENIED" and "eve is attached read-only: pause is refused" in answer.text


def test_a_viewer_reads_and_takes_no_stacks(shared):
    with client(shared, NAMED["viewer"]) as console:
        answer = console.ask(Inspect(nonce=1, what="about"), socket=console.bulk)
        assert isinstance(answer, Inspected)
        answer = console.ask(Inspect(nonce=2, what="stacks"), socket=console.bulk)
        assert isinstance(answer, Failed) and answer.code == "DENIED" and "needs operator" in answer.text


def test_a_viewer_reads_the_past_and_a_revoked_key_does_not(place):
    with client(place, NAMED["viewer"]) as console:
        listed = console.ask(ListPast(nonce=1), socket=console.bulk)
        assert isinstance(listed, PastListed) and listed.engine == place[0].id
        recordings = [file.name for file in listed.files if file.name.startswith("history/")]
        assert recordings and {Path(file.name).suffix for file in listed.files} <= {".rec", ".json"}
        part = console.ask(ReadPast(nonce=2, engine=listed.engine, file=recordings[0]), socket=console.bulk)
        assert isinstance(part, PastPart) and part.data and part.nonce == 2
        answer = console.ask(ReadPast(nonce=3, engine=listed.engine, file="record.json"), socket=console.bulk)
        assert isinstance(answer, Failed) and answer.code == "NOT_FOUND"
        revoke(keys_dir() / "allowed", "viewer-key")
        questions = (ListPast(nonce=4), ReadPast(nonce=5, engine=listed.engine, file=recordings[0]))
        for question in questions:
            answer = console.ask(question, socket=console.bulk)
            assert isinstance(answer, Failed) and answer.code == "DENIED" and "not allowed any more" in answer.text


def test_lists_and_parts_are_limited_by_their_bytes_and_other_questions_are_not(shared):
    with client(shared, NAMED["operator"]) as flood, client(shared) as own:
        answers = flood_until_limited(flood, lambda number: ListPast(nonce=number), flood.bulk)
        limited = [number for number, answer in enumerate(answers) if isinstance(answer, Failed)]
        assert min(limited) >= BYTES_MOST / LIST_BYTES - 1
        assert isinstance(flood.ask(Inspect(nonce=1, what="about"), socket=flood.bulk), Inspected)
        assert isinstance(own.ask(ListPast(nonce=1), socket=own.bulk), PastListed)


def test_another_key_cannot_speak_as_a_known_routing_id(place):
    with client(place, NAMED["admin"]) as first:
        first.control.close()
        first.control = place[1].socket(zmq.DEALER)
        first.control.linger, first.control.routing_id = 0, b"chosen"
        first._codecs[first.control] = next(iter(first._codecs.values()))
        first.open()
        first.hello()
        first.control.close()
    with client(place, NAMED["viewer"]) as second:
        second.control.close()
        second.control = place[1].socket(zmq.DEALER)
        second.control.linger, second.control.routing_id = 0, b"chosen"
        second._codecs[second.control] = next(iter(second._codecs.values()))
        second.open()
        answer = second.ask(second.command(Stop(), "as-the-other"))
        assert answer.code == "DENIED" and answer.text == "say Hello before the first command"


def test_an_id_of_another_key_is_a_conflict(shared):
    with client(shared, NAMED["admin"]) as one, client(shared, NAMED["operator"]) as two:
        one.hello()
        two.hello()
        core_reports(shared, one)
        one.say(one.command(Resume(), "shared-id"))
        while not isinstance(message := shared[2].next(), Command) or message.id != "shared-id":
            pass
        answer = two.ask(two.command(Resume(), "shared-id"))
        assert answer.code == "CONFLICT" and shared[2].nothing()


# --- revocation ---------------------------------------------------------------------------------------------


def test_a_revoked_key_loses_its_live_session_and_others_go_on(place):
    config, _, core = place
    allow(keys_dir() / "allowed", AllowedKey("operator", GONE.public, "gone"))
    with client(place, GONE, (b"",)) as gone, client(place, NAMED["viewer"], (b"",)) as stays:
        assert gone.hello().role == "operator" and stays.hello().role == "viewer"
        gone.snapshot()
        stays.snapshot()
        revoke(keys_dir() / "allowed", "gone")
        answer = gone.ask(gone.command(Pause(), "late"))
        assert (answer.code, answer.text) == ("DENIED", "the key of this console is not allowed any more")
        assert core.nothing()
        answer = gone.ask(Inspect(nonce=1, what="about"), socket=gone.bulk)
        assert isinstance(answer, Failed) and answer.code == "DENIED"
        while gone.state.poll(0):
            gone.state.recv_multipart()
        assert not gone.state.poll(3 * QUIET_MS), "no snapshot reaches a revoked key"
        before = time.time()
        until(lambda: stays.published()[1].wall > before, 5.0, "snapshots of the other console")
        assert isinstance(stays.ask(Ping(nonce=1)), Pong)
        ping(gone)
        assert not gone.control.poll(QUIET_MS)
        assert "late" not in audit_file(Path(config.run_dir)).read_text()


def test_an_idle_revoked_reader_is_cut_off_within_two_seconds(place):
    allow(keys_dir() / "allowed", AllowedKey("viewer", GONE.public, "gone"))
    with client(place, GONE, (b"",)) as gone:
        gone.snapshot()
        revoke(keys_dir() / "allowed", "gone")
        time.sleep(2.0)
        while gone.state.poll(0):
            gone.state.recv_multipart()
        assert not gone.state.poll(3 * QUIET_MS)


def test_a_key_is_allowed_and_demoted_live(place):
    path = keys_dir() / "allowed"
    assert refused(place[0], GONE, public_key(Path(place[0].run_dir)))
    allow(path, AllowedKey("admin", GONE.public, "late"))
    with client(place, GONE) as console:
        assert console.hello().role == "admin"
        path.write_text(path.read_text().replace(f"admin {GONE.public}", f"viewer {GONE.public}"))
        answer = console.ask(console.command(Pause(), "demoted"))
        assert answer.code == "DENIED" and "key late is viewer, pause needs operator" in answer.text


def test_a_file_of_keys_that_others_can_write_allows_nobody_and_is_reported(place):
    path = keys_dir() / "allowed"
    with client(place, None, (frames.TOPIC_EVENT,)) as own, client(place, NAMED["admin"]) as console:
        own.hello()
        console.hello()
        path.chmod(0o666)
        answer = console.ask(console.command(Pause(), "wide"))
        assert answer.code == "DENIED" and "not allowed any more" in answer.text
        seen = until(lambda: b"mode 0666" in own.published()[2], 5.0)
        assert seen and isinstance(own.ask(Ping(nonce=1)), Pong)


# --- limits -------------------------------------------------------------------------------------------------


def flood_until_limited(console, make, socket=None, group=50):
    """Send `make(number)` in groups until some are limited; return all answers.

    Unread answers above 100 are lost, and the queue learns of those that were read in lots of 50.
    """
    answers = []
    while not any(getattr(answer, "code", "") == "RATE_LIMITED" for answer in answers):
        assert len(answers) < 50_000, "no limit"
        for number in range(group):
            console.say(make(len(answers) + number), socket=socket)
        answers += [console.hear(socket) for _ in range(group)]
    return answers


def test_a_flood_of_commands_is_limited_and_costs_no_other_key(place):
    core = place[2]
    with client(place, NAMED["operator"]) as flood, client(place) as own:
        flood.hello()
        own.hello()
        answers = flood_until_limited(flood, lambda number: flood.command(Stop(), f"f-{number}"), group=900)
        codes = [answer.code for answer in answers]
        assert codes[: int(COMMANDS_MOST)] == ["DENIED"] * int(COMMANDS_MOST)
        core_reports(place, own)
        own.say(own.command(Pause(), "other"))
        assert core.next().id == "other"
    audit = audit_file(Path(place[0].run_dir)).read_text()
    assert audit.count("received") == codes.count("DENIED") + 1, "a limited command is not even written down"


def test_a_repeat_of_a_command_is_answered_beyond_the_limit(place):
    core = place[2]
    with client(place, NAMED["admin"]) as flood:
        flood.hello()
        first = flood.command(Fault(kind="none"), "first")
        answer = flood.ask(first)
        core_reports(place, flood)
        flood.say(flood.command(Pause(), "kept"))
        while not isinstance(message := core.next(), Command) or message.id != "kept":
            pass
        core.answer(Refused(id="kept", code="BUSY", text="no"))
        assert flood.hear().code == "BUSY"
        flood_until_limited(flood, lambda number: flood.command(Fault(kind="none"), f"x-{number}"), group=900)
        assert flood.ask(flood.command(Pause(), "kept")).code == "BUSY"
        assert answer.code == "DENIED"


def test_a_flood_of_questions_is_limited_and_fetches_are_not(shared):
    with client(shared, NAMED["viewer"]) as flood, client(shared) as own:
        answers = flood_until_limited(flood, lambda number: Replay(nonce=number, after=0), flood.bulk)
        limited = [number for number, answer in enumerate(answers) if isinstance(answer, Failed)]
        assert min(limited) >= QUESTIONS_MOST - 1  # another test has asked a question with this key
        assert isinstance(own.ask(Inspect(nonce=1, what="about"), socket=own.bulk), Inspected)
        fetched = flood.ask(Fetch(nonce=1, request="r", wait_ms=0), socket=flood.bulk)
        assert getattr(fetched, "code", "") != "RATE_LIMITED"


# --- the handler --------------------------------------------------------------------------------------------


@contextmanager
def public_sockets(accepts):
    """Yield (config, context, handler) of bound sockets whose keys `accepts` judges."""
    config, server, context = make_config(), make_keypair(), zmq.Context()
    handler = ZapHandler(context, {CONSOLES: accepts}) if accepts else None
    sockets = Sockets(context, config, server)
    try:
        yield config, context, handler, sockets, server
    finally:
        sockets.close()
        # As the gateway ends: the handler closes its own socket. `destroy` would close it under its thread.
        context.term()
    remove(config)


def answers(context, config, server):
    """Return whether a peer with any key gets as far as the socket `control`."""
    with zmq.Context() as outside, outside.socket(zmq.DEALER) as socket:
        socket.linger = 0
        be_client(socket, make_keypair(), server.public)
        socket.connect(config.endpoint("control"))
        send(socket, b"h", b"b")
        return context.control.poll(QUIET_MS) != 0 and bool(context.control.recv_multipart())


def test_without_a_handler_everybody_is_refused():
    with public_sockets(None) as (config, _, _, sockets, server):
        assert not answers(sockets, config, server)


def test_a_handler_that_hangs_refuses():
    go_on = threading.Event()
    with public_sockets(lambda key: go_on.wait(60)) as (config, _, _, sockets, server):
        assert not answers(sockets, config, server)
        go_on.set()
        until(lambda: answers(sockets, config, server), 10.0)


def test_refusals_cannot_fill_the_log(caplog):
    with public_sockets(lambda key: False) as (config, _, _, _, server):
        for _ in range(10):
            assert refused(config, make_keypair(), server.public)
    assert 1 <= caplog.text.count("refused key") < 10


def test_a_handler_that_raises_refuses_and_goes_on():
    verdicts = iter([ValueError("x"), True])

    def judge(key):
        verdict = next(verdicts, True)
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    with public_sockets(judge) as (config, _, handler, sockets, server):
        assert refused(config, make_keypair(), server.public)
        assert handler.alive and answers(sockets, config, server)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_handler_that_dies_refuses_until_another_one_runs():
    deadly = [True]

    def judge(key):
        if deadly:
            raise SystemExit
        return True

    with public_sockets(judge) as (config, _, handler, sockets, server):
        assert not answers(sockets, config, server)
        until(lambda: not handler.alive, 5.0)
        assert not answers(sockets, config, server)
        deadly.clear()
        assert handler.revive() and not handler.revive()
        assert answers(sockets, config, server)


def test_the_engine_has_one_key_over_its_gateways(place):
    config = place[0]
    assert public_key(Path(config.run_dir)) == own_keypair("server", make_keypair).public
    (keys_dir() / "server.key").unlink()
    with client(place) as console:
        assert isinstance(console.hello(), Welcome)
    assert public_key(Path(config.run_dir)) != own_keypair("server", make_keypair).public
