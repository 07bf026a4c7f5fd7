"""Parts of the gateway alone: subscriptions, sessions, events, logs."""

import re
import subprocess
import sys
import time

import pytest
import zmq
from monitor_helpers import PRINCIPAL, until
from ppengine.common import logs
from ppengine.gateway.event_log import WARNINGS_KEPT, EventLog
from ppengine.gateway.keyring import Principal
from ppengine.gateway.publisher import Publisher
from ppengine.gateway.sessions import ATTACHED_S, FORGET_S, OF_KEY_MOST, Sessions
from ppengine.protocol import frames
from ppengine.protocol.control import Hello, Replay
from ppengine.protocol.log_tail import tail
from ppengine.protocol.snapshot import Events
from ppengine.protocol.verb_table import ROWS
from ppengine.protocol.verbs import MESSAGES, Continue, Lease


def test_only_what_somebody_subscribed_to_is_wanted():
    with zmq.Context() as context, context.socket(zmq.XPUB) as state, context.socket(zmq.SUB) as reader:
        state.linger = reader.linger = 0
        state.setsockopt(zmq.XPUB_VERBOSE, 1)
        state.bind("inproc://state")
        reader.connect("inproc://state")
        publisher = Publisher(state, "id", "epoch")
        assert not publisher.wanted(b"snap")
        for number in range(500):
            reader.subscribe(b"nonsense %d" % number)
        reader.subscribe(b"snap1")
        assert until(publisher.read_subscriptions) <= {b"snap1"}
        until(lambda: publisher.read_subscriptions() or publisher.wanted(b"snap1"))
        assert publisher.wanted(b"snap1") and not publisher.wanted(b"snap") and not publisher.wanted(b"nonsense 1")
        reader.unsubscribe(b"snap1")
        until(lambda: publisher.read_subscriptions() is not None and not publisher.wanted(b"snap1"))
        reader.subscribe(b"")
        until(lambda: publisher.read_subscriptions() and publisher.wanted(b"event"))


def test_events_of_one_turn_are_one_message():
    with zmq.Context() as context, context.socket(zmq.XPUB) as state, context.socket(zmq.SUB) as reader:
        state.linger = reader.linger = 0
        state.bind("inproc://state")
        reader.connect("inproc://state")
        reader.subscribe(b"event")
        publisher = Publisher(state, "id", "epoch")
        until(lambda: publisher.read_subscriptions())
        events = EventLog(publisher.event)
        for number in range(1, 1004):
            events.say("test", f"n{number}")
        publisher.flush()
        publisher.flush()  # nothing is left to send
        got = []
        while reader.poll(200):
            _, head, body = reader.recv_multipart()
            got.append((frames.decode_header(head).seq, [one.seq for one in frames.decode_as(Events, body).events]))
        assert got == [(1000, list(range(1, 1001))), (1003, [1001, 1002, 1003])]


def test_every_verb_that_the_gateway_executes_has_a_handler():
    assert {MESSAGES[row.name] for row in ROWS.values() if row.runs == "gateway"} == {Continue, Lease}


def hello(user="eve", read_only=False):
    return Hello(proto_min=1, proto_max=1, client="c", user=user, read_only=read_only)


def test_a_console_counts_from_its_first_ping_until_ten_seconds_of_silence():
    said = []
    sessions = Sessions(lambda what, session: said.append((what, session.user)))
    sessions.hello(b"1", hello(), 0.0, PRINCIPAL)
    assert sessions.count(1.0) == 0
    sessions.ping(b"1", 2.0)
    sessions.ping(b"1", 3.0)
    sessions.ping(b"unknown", 3.0)
    assert sessions.count(3.0 + ATTACHED_S) == 1
    assert sessions.count(3.1 + ATTACHED_S) == 0
    assert said == [("attached", "eve"), ("detached", "eve")]
    sessions.ping(b"1", 50.0)
    assert sessions.count(50.0) == 1, "it was only slow"
    assert sessions.get(b"1").role == "admin"
    assert sessions.count(51.0 + FORGET_S) == 0 and sessions.get(b"1") is None


def test_a_second_hello_cannot_keep_a_role_that_it_gave_up():
    sessions = Sessions(lambda what, session: None)
    sessions.hello(b"1", hello(), 0.0, PRINCIPAL)
    assert sessions.hello(b"1", hello(read_only=True), 1.0, PRINCIPAL).role == "viewer"
    assert sessions.get(b"1").role == "viewer"


def test_sessions_are_bounded(monkeypatch):
    """With fewer than there may be: each new one looks at all."""
    monkeypatch.setattr("ppengine.gateway.sessions.MOST", 400)
    monkeypatch.setattr("ppengine.gateway.sessions.OF_KEY_MOST", 40)
    sessions = Sessions(lambda what, session: None)
    for number in range(400 + 5):
        owner = Principal(f"{number % 20:064x}", f"k{number % 20}", "operator")
        sessions.hello(b"%d" % number, hello(), 0.0, owner)
    assert sessions.get(b"4") is None and sessions.get(b"5") is not None


def test_a_routing_id_that_another_key_takes_over_ends_the_session_before():
    said = []
    sessions = Sessions(lambda what, session: said.append((what, list(session.requests))))
    sessions.hello(b"1", hello(), 0.0, PRINCIPAL).requests = ["r-1"]
    other = sessions.hello(b"1", hello(), 1.0, Principal("1" * 64, "other", "viewer"))
    assert said == [("detached", ["r-1"])] and other.requests == [] and other.role == "viewer"


def test_sessions_of_one_key_make_room_among_themselves():
    sessions = Sessions(lambda what, session: None)
    sessions.hello(b"first", hello(), 0.0, Principal("1" * 64, "other", "viewer"))
    for number in range(OF_KEY_MOST + 5):
        sessions.hello(b"%d" % number, hello(), 0.0, PRINCIPAL)
    assert sessions.get(b"first") is not None
    assert sessions.get(b"4") is None and sessions.get(b"5") is not None


@pytest.mark.parametrize(
    ("after", "until_seq", "want", "gone"),
    [
        (0, None, [4, 5, 6], True), (3, None, [4, 5, 6], False), (4, 5, [5], False), (6, None, [], False),
        (1, 2, [], True), (5, 4, [], False), (7, None, [], True), (-5, None, [4, 5, 6], True), (4, 99, [5, 6], False),
    ],
)  # fmt: skip
def test_replay_of_a_small_ring(after, until_seq, want, gone):
    published = []
    events = EventLog(published.append, kept=3)
    for number in range(1, 7):
        events.say("test", f"n{number}")
    answer = events.replay(Replay(nonce=1, after=after, until=until_seq))
    assert ([event.seq for event in answer.events], answer.gone, answer.newest) == (want, gone, 6)
    assert [event.seq for event in published] == [1, 2, 3, 4, 5, 6]
    assert events.oldest == 4


def test_warnings_stay_when_ends_of_requests_have_filled_the_ring():
    events = EventLog(lambda event: None, kept=3)
    for kind in ("stage.dead", "stage.stopped", "stage.ready", *("request.finished",) * 5):
        events.say(kind, "text")

    def found(**question):
        return [event.seq for event in events.replay(Replay(nonce=1, after=0, **question)).events]

    assert (found(), found(level="info"), found(level="warning"), found(level="error")) == (
        [6, 7, 8], [6, 7, 8], [1, 2], [1],
    )  # fmt: skip
    assert (found(level="warning", most=1), found(level="warning", most=0), found(level="warning", until=1)) == (
        [2], [], [1],
    )  # fmt: skip
    for _ in range(WARNINGS_KEPT):
        events.say("stage.stopped", "text")
    assert found(level="warning") == list(range(9, 9 + WARNINGS_KEPT)) and found(level="error") == []


def test_replay_before_anything_happened():
    answer = EventLog(lambda event: None).replay(Replay(nonce=1, after=0))
    assert answer.events == [] and not answer.gone


def test_logs_of_odd_files(tmp_path):
    assert tail(tmp_path, 5) == []
    (tmp_path / "empty.log").write_bytes(b"")
    (tmp_path / "long.log").write_bytes(b"x" * 5_000_000)
    (tmp_path / "folder.log").mkdir()
    lines = tail(tmp_path, 2)
    assert len(lines) == 1 and lines[0].startswith("long| xxx") and len(lines[0]) < 2_000_000
    assert tail(tmp_path, 0) == [] and tail(tmp_path, -3) == []


def test_log_lines_of_all_processes_come_by_their_time(tmp_path):
    (tmp_path / "core.log").write_text("2026-01-01 10:00:01 INFO a\nTraceback of a\n2026-01-01 10:00:04 INFO d\n")
    (tmp_path / "stage0.log").write_text("2026-01-01 10:00:02 INFO b\n2026-01-01 10:00:03 INFO c\n")
    assert [line[-1] for line in tail(tmp_path, 10)] == ["a", "a", "b", "c", "d"]
    assert tail(tmp_path, 10)[1] == "core| Traceback of a"
    (tmp_path / "agent.log").write_text("2026-01-01 10:00:02.700 INFO y\n")
    (tmp_path / "stage1.log").write_text("2026-01-01 10:00:02.080 INFO x\n")
    assert [line[-1] for line in tail(tmp_path, 10)] == ["a", "a", "b", "x", "y", "c", "d"]


def test_lines_of_one_second_have_an_order():
    told = "import logging; from ppengine.common import logs; logs.start(); logging.getLogger('ppengine').info('x')"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.]\d{3} INFO x\n", done.stderr)
    assert logs.is_routine(done.stderr)


def test_a_text_in_an_exception_moves_no_cursor_and_forges_no_line():
    forged = "2026-01-01 00:00:00.000 INFO all is well"
    bad = f"\x1b]52;c;aGk=\x07\x9b2J\u202e\r\n{forged}"
    program = f"""
import logging; from ppengine.common import logs; logs.start()
try: raise ValueError({bad!r})
except ValueError: logging.getLogger('ppengine').exception('x')
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stderr.split("\n")
    assert forged in lines[-2]
    assert all(map(str.isprintable, lines))
    assert [line for line in lines if re.match(r"\d{4}-", line)] == lines[:1]


def test_a_tail_ends_at_a_time_however_large_the_log_is(tmp_path):
    begin, written, ends = 1_700_000_000, [], {}
    for at in range(20_000):
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begin + at))
        written.append(f"{stamp}.500 INFO line {at} {'x' * (at % 90)}")
        if at % 1000 == 999:
            written += ["Traceback:", *(f"  of {at}" for _ in range(5))]
        ends[at] = len(written)
    (tmp_path / "core.log").write_text("\n".join(written) + "\n")
    for at in (1, 998, 999, 1000, 9_999, 19_998, 19_999):
        for moment, end in ((begin + at + 0.5, ends[at]), (begin + at + 0.4, ends[at - 1])):
            assert tail(tmp_path, 9, None, moment) == [f"core| {line}" for line in written[max(0, end - 9) : end]], at
    assert tail(tmp_path, 6, None, begin - 1.0) == [] and tail(tmp_path, 0, None, begin + 5.0) == []
    assert tail(tmp_path, 6, None, begin + 1e6) == tail(tmp_path, 6)
