"""The gateway as a real process, between a core, an agent and consoles made of plain sockets."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import zmq
from monitor_helpers import (
    TRIES,
    Client,
    FakeCore,
    FakeTexts,
    core_report,
    make_config,
    processes,
    remove,
    sample,
    stage_process,
    started,
    until,
    view,
)
from ppengine.common.procfs import read_stat
from ppengine.gateway.kept_commands import brief
from ppengine.protocol import frames
from ppengine.protocol.backend_calls import BackendCall
from ppengine.protocol.control import (
    Accepted,
    Command,
    Deferred,
    Failed,
    Fetch,
    Fetched,
    Goodbye,
    Hello,
    Inspect,
    Inspected,
    Outcome,
    Ping,
    Pong,
    Refused,
    Replay,
    Replayed,
    Welcome,
)
from ppengine.protocol.facts import Exited, Serving
from ppengine.protocol.gpu import GpuInfo, GpuProcess
from ppengine.protocol.inspection import LogsDetail
from ppengine.protocol.offline import AbortMany
from ppengine.protocol.place import Place
from ppengine.protocol.reports import Happened, ProcessInfo, Recall, Recalled
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Event, Events
from ppengine.protocol.stage_samples import AgentReport
from ppengine.protocol.store_verbs import StorePause
from ppengine.protocol.text_messages import Encode, Encoded
from ppengine.protocol.verbs import Abort, Continue, Many, Priority, Resume, SetMemory, Stop, Submit

GATEWAY = "ppengine.gateway"


class World:
    """One gateway with what is around it."""

    def __init__(self, config, context, core, process, line):
        self.config, self.context, self.core, self.process, self.line = config, context, core, process, line
        self.clients = []

    def client(self, *topics, user="eve", read_only=False, greet=True):
        made = Client(self.context, self.config, topics).open()
        self.clients.append(made)
        if greet:
            assert isinstance(made.hello(user, read_only=read_only), Welcome)
        return made

    def watcher(self, user="wim"):
        """Return a console that certainly gets every event from now on."""
        made = self.client(frames.TOPIC_SNAPSHOT, frames.TOPIC_EVENT, user=user)
        made.snapshot()
        return made

    def audit(self):
        return [json.loads(line) for line in Path(self.config.run_dir, "audit.jsonl").read_text().splitlines()]

    def close(self):
        for client in self.clients:
            client.close()
        self.core.close()


@pytest.fixture
def world(tmp_path):
    config = make_config()
    with zmq.Context() as context:
        core = FakeCore(context, config)
        with started(GATEWAY, config, PPCONSOLE_AUDIT_DIR=str(tmp_path)) as (process, line):
            until(lambda: Path(config.run_dir, "bulk").exists(), 30.0, "the gateway opens its sockets")
            made = World(config, context, core, process, line)
            core.report()
            until(lambda: made.client(greet=False).ask(Ping(nonce=0)).core_age_ms is not None, what="a first report")
            yield made
            made.close()
    remove(config)


def applied(command, **more):
    return Outcome(id=command.id, op="op-1", state="applied", text="done", **more)


def events_of(client, kinds, timeout=60.0):
    """Return the events up to the first of each of `kinds`."""
    seen, deadline = [], time.monotonic() + timeout
    while not set(kinds) <= {event.kind for event in seen}:
        topic, head, body = client.published(max(0.01, deadline - time.monotonic()))
        if topic == frames.TOPIC_EVENT:
            seen += frames.decode_as(Events, body).events
            assert head.seq == seen[-1].seq
    return seen


# --- handshake ----------------------------------------------------------------------------------------------


def test_hello_and_ping(world):
    client = world.client(greet=False)
    welcome = client.hello()
    assert (welcome.role, welcome.epoch, welcome.engine, welcome.proto) == ("admin", "epoch-1", world.config.id, 2)
    assert welcome.event_oldest == welcome.event_seq + 1 or welcome.event_oldest == 1
    assert client.hello(read_only=True).role == "viewer"
    pong = client.ask(Ping(nonce=5))
    assert isinstance(pong, Pong) and pong.nonce == 5 and pong.step == 7 and pong.core_age_ms < 5000


def test_a_protocol_that_is_not_spoken(world):
    answer = world.client(greet=False).ask(Hello(proto_min=7, proto_max=9, client="c", user="u"))
    assert isinstance(answer, Refused) and answer.code == "UNSUPPORTED" and "7 to 9" in answer.text


def test_a_command_before_hello_is_denied(world):
    client = world.client(greet=False)
    assert client.ask(client.command(Stop(), "c1")).code == "DENIED"


def test_public_sockets_are_for_this_user_alone(world):
    for name in ("state", "control", "bulk", "collect"):
        mode = Path(world.config.run_dir, name).stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) & 0o077 == 0
    client = world.client()
    client.ask(client.command(Stop(), "c1", epoch="old"))
    assert stat.S_IMODE(Path(world.config.run_dir, "audit.jsonl").stat().st_mode) == 0o600


# --- commands -----------------------------------------------------------------------------------------------


def test_a_command_goes_to_the_core_and_its_answers_come_back(world):
    client = world.watcher("eve")
    client.say(client.command(SetMemory(utilization=0.6), "c1", reason="room for eve", by="mallory"))
    command = world.core.next()
    assert command.verb == SetMemory(utilization=0.6) and command.by == "eve", "the session says who it is"
    world.core.answer(Accepted(id="c1", op="op-1"))
    world.core.answer(Deferred(id="c1", op="op-1", text="in flight at stage 1"))
    world.core.answer(applied(command, step=9, revision=4))
    assert [type(client.hear()) for _ in range(3)] == [Accepted, Deferred, Outcome]
    world.core.report(
        Happened(events=[Event(seq=0, wall=1.0, kind="op.applied", text="by the core", op="op-1")], first=1)
    )
    told = events_of(client, ["op.accepted", "op.deferred", "op.applied"])
    assert [event.kind for event in told if event.op == "op-1"] == ["op.accepted", "op.deferred", "op.applied"]
    deferred = next(event for event in told if event.kind == "op.deferred")
    assert deferred.text == "set-memory 0.6: in flight at stage 1 (room for eve)" and deferred.by == "eve"
    assert told[-1].text == "by the core", "the end is told once, by who carried it out"


def test_the_free_memory_of_devices_goes_before_a_change_of_memory(world):
    client = world.watcher("eve")
    ours = [GpuProcess(pid=1001, bytes=9), GpuProcess(pid=world.process.pid, bytes=5)]
    others = [GpuProcess(pid=4242, name="small", bytes=1), GpuProcess(pid=4243, name="python3", bytes=60)]
    card = GpuInfo(uuid="GPU-a", age_ms=200.0, memory_total=100, memory_driver=2, memory_used=75,
                   processes=[*ours, *others])  # fmt: skip
    report = AgentReport(mono_ns=time.monotonic_ns(), node="n0", stages=[sample(0)], gpus=[card], available=777)
    world.core.report(processes(ProcessInfo(role="gateway", stage=None, rank=None, pid=world.process.pid)))
    world.core.report(report)
    stages = [view(0, host="n0"), view(1, device_uuid="GPU-a")]
    until(lambda: world.core.report(stages=stages) or client.snapshot().stages[1].gpu, what="the card is known")
    client.say(client.command(Resume(), "c1"))
    client.say(client.command(SetMemory(utilization=0.6), "c2"))
    sent = [world.core.next() for _ in range(3)]
    assert [type(message).__name__ for message in sent] == ["Command", "DeviceRooms", "Command"]
    host, found = sent[1].rooms
    assert (host.device, host.free, host.holders) == ("n0", 777, None)
    assert (found.device, found.free) == ("GPU-a", 23) and 200 <= found.age_ms < 60_000
    assert [each.name for each in found.holders] == ["python3", "small"], "not the stage, and no process of the engine"


def test_a_command_that_ends_at_once_is_one_event(world):
    client = world.watcher("eve")
    client.say(client.command(Resume(), "c1"))
    command = world.core.next()
    world.core.answer(Accepted(id="c1", op="op-1"))
    world.core.answer(applied(command))
    world.core.report(
        Happened(events=[Event(seq=0, wall=1.0, kind="op.applied", text="by the core", op="op-1")], first=1)
    )
    told = events_of(client, ["op.applied"])
    assert [event.kind for event in told if event.op == "op-1"] == ["op.applied"]


def test_every_command_is_audited_before_and_after(world, tmp_path):
    client = world.client()
    submit = Submit(
        prompt="a secret prompt", sampling=SamplingParams(stop=["secret"], bad_words=["secret"], max_tokens=3)
    )
    client.say(client.command(submit, "c1", reason="try"))
    ids = SamplingParams(stop=["secret"], bad_words_ids=[[7]], max_tokens=3)
    with FakeTexts(world.context, world.config) as texts:
        assert texts.next() == Encode(id="c1", submit=submit)
        texts.say(Encoded(id="c1", submit=Submit(prompt_token_ids=[5, 6], sampling=ids)))
        command = world.core.next()
    assert (command.id, command.verb) == ("c1", Submit(prompt_token_ids=[5, 6], sampling=ids))
    assert [line["outcome"] for line in world.audit()] == ["received"], "before the core has it"
    world.core.answer(Accepted(id="c1", op="op-1", request="r-1"))
    world.core.answer(Outcome(id="c1", op="op-1", state="applied", text="queued", request="r-1"))
    client.hear(), client.hear()
    lines = until(lambda: found if len(found := world.audit()) == 3 else None)
    assert [line["outcome"] for line in lines] == ["received", "accepted", "applied"]
    first, last = lines[0], lines[-1]
    assert (first["verb"], first["by"], first["reason"], first["id"], first["dry_run"]) == (
        "submit", "eve", "try", "c1", False,
    )  # fmt: skip
    assert first["args"]["prompt_length"] == 15 and first["args"]["sampling"]["max_tokens"] == 3
    assert last["text"] == "queued" and last["op"] == "op-1" and last["wall"] >= first["wall"]
    text = Path(world.config.run_dir, "audit.jsonl").read_text()
    assert "secret" not in text
    (kept,) = tmp_path.glob("*.jsonl")
    assert kept.read_text() == text and stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_many_requests_are_one_entry_with_count_and_ids(world):
    client = world.client()
    many = Many(verbs=[Priority(request=f"r{number}", priority=3) for number in range(4)], revisions=[1, None, 2, 3])
    client.say(client.command(many, "c1"))
    world.core.next()
    world.core.answer(Refused(id="c1", code="BUSY", text="loading"))
    client.hear()
    (received, refused) = until(lambda: found if len(found := world.audit()) == 2 else None)
    arguments = {"verb": "priority", "count": 4, "requests": ["r0", "r1", "r2", "r3"], "priority": 3}
    assert received["verb"] == "many" and received["args"] == refused["args"] == arguments
    assert brief(client.command(many, "c2")) == "priority 4 requests"


def test_refusals_are_audited_and_never_reach_the_core(world):
    client, viewer = world.client(), world.client(user="vic", read_only=True)
    old = client.command(Abort(request="r-1"), "c1", epoch="epoch-0")
    assert client.ask(old).code == "STALE_EPOCH"
    head = frames.header(world.config.id, world.config.epoch)
    late = msgspec.structs.replace(head, wall=head.wall - 6, mono_ns=head.mono_ns - 6_000_000_000)
    answer = client.ask(client.command(Abort(request="r-1"), "c2", ttl_ms=5000), head=late)
    assert answer.code == "EXPIRED" and "5000 ms" in answer.text
    jumped = msgspec.structs.replace(head, wall=head.wall - 6)
    assert client.ask(client.command(Abort(request="r-1"), "c3", ttl_ms=5000), head=jumped).code == "EXPIRED"
    answer = viewer.ask(viewer.command(Abort(request="r-1"), "c4"))
    assert answer.code == "DENIED" and "read-only" in answer.text
    assert world.core.nothing()
    refused = [line for line in world.audit() if line["outcome"] == "refused"]
    assert [(line["id"], line["code"]) for line in refused] == [
        ("c1", "STALE_EPOCH"), ("c2", "EXPIRED"), ("c3", "EXPIRED"), ("c4", "DENIED"),
    ]  # fmt: skip
    assert len(world.audit()) == 8, "each was received first"


def test_a_repeat_gets_the_first_answers_also_from_another_connection(world):
    client = world.client()
    command = client.command(Abort(request="r-1"), "c1")
    client.say(command)
    world.core.next()
    world.core.answer(Accepted(id="c1", op="op-1"))
    assert isinstance(client.hear(), Accepted)
    again = world.client()
    assert again.ask(command) == Accepted(id="c1", op="op-1")
    assert world.core.nothing(), "the core sees it once"
    world.core.answer(applied(command))
    assert isinstance(again.hear(), Outcome), "the newest connection hears the rest"
    assert again.ask(command) == Accepted(id="c1", op="op-1") and again.hear().state == "applied"
    other = world.client(user="mallory")
    assert other.ask(command).code == "CONFLICT"
    assert client.ask(client.command(Abort(request="r-2"), "c1")).code == "CONFLICT"
    assert client.ask(client.command(Abort(request="r-2"), "")).code == "INVALID"


def test_without_a_core_a_command_is_refused_at_once(world):
    client = world.client()
    world.core.report(processes(ProcessInfo(role="core", stage=None, rank=None, pid=99, exit_code=1, detail="no room")))
    until(lambda: client.ask(client.command(Abort(request="r"), f"c{time.monotonic_ns()}")).code == "NO_CORE")
    answer = client.ask(client.command(Abort(request="r"), "c1"))
    assert answer.code == "NO_CORE" and "no room" in answer.text
    assert world.audit()[-1]["code"] == "NO_CORE"


def test_a_core_that_ends_for_good_ends_its_open_commands(world):
    client = world.client()
    world.core.report(processes(ProcessInfo(role="core", stage=None, rank=None, pid=os.getpid())))
    for identity in ("c1", "c2"):
        client.say(client.command(Abort(request="r"), identity))
        world.core.next()
    world.core.answer(Accepted(id="c1", op="op-1"))
    assert isinstance(client.hear(), Accepted)
    client.say(client.command(Stop(), "c3"))
    world.core.next()
    world.core.report(processes(ProcessInfo(role="core", stage=None, rank=None, pid=os.getpid(), exit_code=1)))
    ends = {reply.id: reply for reply in (client.hear(), client.hear(), client.hear())}
    assert isinstance(ends["c1"], Outcome) and ends["c1"].state == "failed" and "not known" in ends["c1"].text
    assert isinstance(ends["c2"], Refused) and ends["c2"].code == "NO_CORE"
    assert isinstance(ends["c3"], Outcome) and ends["c3"].state == "applied", "that it left is what was asked"


def core_process(pid, **fields):
    return processes(ProcessInfo(role="core", stage=None, rank=None, pid=pid, **fields))


def test_commands_and_questions_wait_for_a_core_that_is_restarted(world):
    client = world.client(frames.TOPIC_SNAPSHOT, frames.TOPIC_EVENT)
    world.core.report(core_process(77))
    client.say(client.command(Abort(request="r"), "open"))
    world.core.next()
    client.say(client.command(Abort(request="r"), "accepted"))
    world.core.next()
    world.core.answer(Accepted(id="accepted", op="op-1"))
    assert isinstance(client.hear(), Accepted)
    client.say(Inspect(nonce=5, what="blocks", request="r-1"), socket=client.bulk)
    assert world.core.next().request == "r-1"
    world.core.report(core_process(77, exit_code=-9, detail="killed by SIGKILL"))
    until(lambda: "is restarted" in client.snapshot().engine.message)
    assert client.snapshot().engine.state == "degraded"
    client.say(client.command(Abort(request="r"), "later"))
    client.say(Inspect(nonce=6, what="blocks", request="r-2"), socket=client.bulk)
    seen = messages(world.core, 1)
    assert isinstance(seen[0], Recall) and {"open", "accepted"} <= set(seen[0].commands), "nothing else yet"
    world.core.report(core_process(78))
    world.core.report(Recalled(newest=0, pid=77))
    assert all(isinstance(one, Recall) for one in messages(world.core, 2)), "an answer of the core that ended"
    answered = Accepted(id="accepted", op="op-1"), Outcome(id="accepted", op="op-1", state="applied", text="done")
    world.core.report(Recalled(newest=0, pid=78, replies=list(answered), unknown=["open"]))
    came = messages(world.core, 4, lambda one: not isinstance(one, Recall))
    assert sorted(one.id for one in came if isinstance(one, Command)) == ["later", "open"]
    assert sorted(one.request for one in came if isinstance(one, Inspect)) == ["r-1", "r-2"]
    end = client.hear()
    assert (end.id, end.state) == ("accepted", "applied"), "its acceptance is not repeated"
    assert [line["outcome"] for line in world.audit() if line["id"] == "accepted"] == [
        "received",
        "accepted",
        "applied",
    ]
    world.core.report(
        Exited(mono_ns=1, role="core", place=None, generation=1, pid=77, exit_code=-9, detail="killed by SIGKILL")
    )  # fmt: skip
    said = [event.text for event in events_of(client, ["core.ended"]) if event.kind == "core.ended"]
    assert said == ["the engine core (pid 77) has ended, killed by SIGKILL"]


def test_a_backend_whose_calls_end_two_stores_is_paused_by_the_engine(world):
    for pid in (71, 72):
        world.core.report(Exited(
            mono_ns=time.monotonic_ns(), role="store0", place=None, generation=1, pid=pid, exit_code=-11,
            calls=[BackendCall("write", "b1")],
        ))  # fmt: skip
    (command,) = messages(world.core, 1, lambda one: isinstance(one, Command))
    assert (command.verb, command.by, command.role) == (StorePause(backend="b1"), "the engine", "admin")
    world.core.answer(Accepted(id=command.id, op="op-1"))
    world.core.answer(applied(command))
    until(lambda: world.audit()[-1]["outcome"] == "applied")
    lines = [line for line in world.audit() if line["id"] == command.id]
    assert [line["outcome"] for line in lines] == ["received", "accepted", "applied"]
    assert (lines[0]["by"], lines[0]["verb"], lines[0]["args"]) == ("the engine", "store-pause", {"backend": "b1"})
    assert lines[0]["reason"].endswith("while write of b1 was under way; ppconsole store resume b1 uses it again")


def test_a_core_that_was_asked_often_gets_a_command_once(world):
    """It boots slowly, and answers all questions at once; each was asked before the command came."""
    client = world.client()
    world.core.report(core_process(100))
    client.say(client.command(Abort(request="r"), "open"))
    world.core.next()
    world.core.report(core_process(100, exit_code=-9, detail="killed by SIGKILL"))
    messages(world.core, 3, lambda one: isinstance(one, Recall))
    world.core.report(core_process(101))
    for _ in range(4):
        world.core.report(Recalled(newest=0, pid=101, unknown=["open"]))
    client.say(client.command(Abort(request="r"), "last"))
    came = messages(world.core, 2, lambda one: isinstance(one, Command))
    assert [one.id for one in came] == ["open", "last"]
    for name in ("open", "last"):
        world.core.answer(Refused(id=name, code="NOT_FOUND", text="no such request"))
        assert client.hear().code == "NOT_FOUND"


def test_a_command_that_ends_cores_is_not_sent_for_ever(world):
    client = world.client()
    world.core.report(core_process(100))
    client.say(client.command(Abort(request="r"), "poison"))
    for pid in (100, 101, 102):
        assert isinstance(messages(world.core, 1, lambda one: isinstance(one, Command))[0], Command)
        world.core.report(core_process(pid, exit_code=-11, detail="killed by SIGSEGV"))
        messages(world.core, 1, lambda one: isinstance(one, Recall))
        world.core.report(core_process(pid + 1))
        world.core.report(Recalled(newest=0, pid=pid + 1, unknown=["poison"]))
    end = client.hear()
    assert end.code == "FAILED"
    assert end.text == "the engine core ended 3 times before it answered; it is not tried again"
    assert [line["outcome"] for line in world.audit() if line["id"] == "poison"] == ["received", "refused"]


def messages(core, count, wanted=lambda one: True):
    """Return the next `count` messages of a kind on `front`."""
    found = []
    while len(found) < count:
        message = core.next()
        if wanted(message):
            found.append(message)
    return found


def test_a_stage_that_somebody_stopped_is_continued_without_the_core(world):
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        os.kill(sleeper.pid, signal.SIGSTOP)
        until(lambda: read_stat(sleeper.pid).state == "T")
        client = world.client()
        assert client.ask(client.command(Continue(stage=0), "c0")).code == "NOT_FOUND"
        world.core.report(processes(stage_process(0, pid=sleeper.pid)))
        until(lambda: client.ask(Ping(nonce=1)) and Path(world.config.run_dir).exists())
        plan = until(lambda: _planned(client, f"d{time.monotonic_ns()}"))
        assert str(sleeper.pid) in plan.text and read_stat(sleeper.pid).state == "T"
        client.say(client.command(Continue(stage=0), "c1"))
        assert isinstance(client.hear(), Accepted)
        assert client.hear().state == "applied"
        assert world.audit()[-1]["outcome"] == "applied"
        until(lambda: read_stat(sleeper.pid).state != "T")
        plan, text = _planned(client, "awake"), "stage 0 is not stopped: SIGCONT changes nothing"
        assert (plan.text, plan.plan) == (text, [text])
        assert world.core.nothing()
        assert world.audit()[-1]["outcome"] == "planned"
    finally:
        sleeper.kill()
        sleeper.wait()


def _planned(client, identity):
    reply = client.ask(client.command(Continue(stage=0), identity, dry_run=True))
    return reply if isinstance(reply, Outcome) else None


def test_requests_that_were_to_go_with_their_console_are_aborted(world):
    client, watcher = world.client(), world.watcher()
    client.ask(Ping(nonce=1))
    client.say(client.command(Submit(prompt_token_ids=[1], abort_on_detach=True), "c1"))
    world.core.next()
    world.core.answer(Accepted(id="c1", op="op-1", request="r-1"))
    client.hear()
    client.say(Goodbye())
    message = world.core.next()
    assert message == AbortMany(session="", requests=["r-1"])
    assert "r-1" in events_of(watcher, ["request.abort_on_detach"])[-1].text


# --- state --------------------------------------------------------------------------------------------------


def test_snapshots_come_at_their_rates(world):
    rates = []
    for _ in range(TRIES):
        fast = world.client(frames.TOPIC_SNAPSHOT, greet=False)
        assert fast.snapshot().engine.id == world.config.id
        slow = world.client(frames.TOPIC_SNAPSHOT_SLOW, greet=False)
        seen = two_seconds(fast, frames.TOPIC_SNAPSHOT)
        numbers = [head.seq for head in seen]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "a sequence without gaps"
        rates.append((len(seen), len(two_seconds(slow, frames.TOPIC_SNAPSHOT_SLOW))))
        if 15 <= rates[-1][0] <= 24 and 1 <= rates[-1][1] <= 4:
            break
    assert 15 <= rates[-1][0] <= 24, rates
    assert 1 <= rates[-1][1] <= 4, rates


def two_seconds(client, wanted):
    """Return the headers of what the gateway sent in two seconds of its own clock."""
    seen = []
    while not seen or seen[-1].mono_ns - seen[0].mono_ns < 2e9:
        topic, head, _ = client.published()
        if topic == wanted:
            seen.append(head)
    return seen[:-1]


def test_a_new_console_gets_its_first_snapshot_at_once(world):
    waits = []
    for _ in range(TRIES):
        slow = world.client(frames.TOPIC_SNAPSHOT_SLOW, greet=False)
        begin = time.monotonic()
        assert slow.snapshot().engine.id == world.config.id
        waits.append(time.monotonic() - begin)
        slow.state.unsubscribe(frames.TOPIC_SNAPSHOT_SLOW)
    assert min(waits) < 0.5, "not at the next full second"


def test_the_snapshot_shows_the_reports_and_counts_consoles(world):
    client = world.client(frames.TOPIC_SNAPSHOT)
    world.client(user="vic").ask(Ping(nonce=1))
    world.client(user="verb")
    world.core.agent_report(sample(0, op="forward", op_step=9), sample(1))
    world.core.report()
    found = until(lambda: shown if (shown := client.snapshot()).stages[0].state == "computing" else None)
    assert found.stages[0].op == "forward m9" and found.stages[0].sample_age_ms < 2000
    assert found.engine.consoles == 1, "a verb that never pings is no console"
    assert found.core_age_ms is not None
    assert found.verdicts == []


def test_a_sign_of_life_each_second(world):
    client = world.client(frames.TOPIC_HEARTBEAT, greet=False)
    signs = [client.published() for _ in range(1 + TRIES)]
    assert {topic for topic, _, _ in signs} == {frames.TOPIC_HEARTBEAT}
    heads = [head for _, head, _ in signs]
    assert [head.seq for head in heads] == list(range(heads[0].seq, heads[0].seq + len(heads)))
    between = [(after.mono_ns - before.mono_ns) / 1e9 for before, after in pairwise(heads)]
    assert any(0.7 < seconds < 1.5 for seconds in between), between


def test_a_stopped_stage_is_named_within_a_second_and_cleared(world):
    client = world.client(frames.TOPIC_SNAPSHOT, frames.TOPIC_EVENT)

    def play(state, wanted):
        """Report that state until the verdicts are as wanted; return the picture and the seconds it took."""
        begin = time.monotonic()
        while time.monotonic() - begin < 20:
            world.core.agent_report(sample(0, process_state=state), sample(1))
            world.core.report()
            picture = client.snapshot()
            if [v.cause for v in picture.verdicts] == wanted:
                return picture, time.monotonic() - begin
        return pytest.fail(f"{wanted} is not told")

    play("S", [])
    tries = []
    for _ in range(TRIES):
        snapshot, named = play("T", ["stopped"])
        assert snapshot.stages[0].state == "stopped" and "kill -CONT 1000" in snapshot.verdicts[0].suggest
        tries.append((named, play("S", [])[1]))
        if max(tries[-1]) < 1.0:
            break
    assert max(tries[-1]) < 1.0, tries
    viewer = world.client()
    told = viewer.ask(Replay(nonce=1, after=0), socket=viewer.bulk).events
    kinds = [event.kind for event in told]
    for kind in ("stage.stopped", "verdict.raised", "stage.continued", "verdict.cleared"):
        assert kind in kinds


def test_a_dead_stage_is_named_within_a_second(world):
    client = world.client(frames.TOPIC_SNAPSHOT)
    tries = []
    for number in range(1, TRIES + 1):
        pid, one = 1000 + number, Place(1, 0)
        here = stage_process(1, pid=pid, generation=number)
        served = ((Place(0, 0), 1), (one, number))
        world.core.agent_report(sample(0), sample(1, pid=pid))
        world.core.report(processes(stage_process(0), here))
        world.core.report(Serving(mono_ns=0, generation=number, processes=served, took_s=1.0, recomputed=0))
        until(lambda: not (shown := client.snapshot()).verdicts and shown.stages[1].state == "idle")
        begin, end = time.monotonic(), {"exit_code": -9, "detail": "killed by SIGKILL"}
        world.core.report(
            Exited(mono_ns=time.monotonic_ns(), role="stage", place=one, generation=number, pid=pid, **end)
        )  # fmt: skip
        world.core.report(processes(stage_process(0), msgspec.structs.replace(here, **end)))
        found = until(lambda: shown if (shown := client.snapshot()).verdicts else None)
        tries.append(time.monotonic() - begin)
        assert (found.verdicts[0].stage, found.verdicts[0].cause) == (1, "dead")
        assert found.stages[1].state == "dead"
        if tries[-1] < 1.0:
            break
    assert tries[-1] < 1.0, tries


def test_a_silent_core_is_named(world):
    client = world.client(frames.TOPIC_SNAPSHOT)
    found = until(lambda: shown if (shown := client.snapshot()).verdicts else None)
    assert (found.verdicts[0].stage, found.verdicts[0].cause) == (None, "core")
    assert found.core_age_ms > 2000
    world.core.report()
    until(lambda: client.snapshot().verdicts == [])


def test_consoles_that_come_are_told(world):
    watcher = world.watcher()
    world.client().ask(Ping(nonce=1))
    told = events_of(watcher, ["console.attached"])[-1]
    assert told.by == "eve" and told.text.startswith("attached ("), "who it was stands in a field of its own"


# --- bulk ---------------------------------------------------------------------------------------------------


def test_replay_gives_a_range_and_says_what_is_gone(world):
    client = world.client(frames.TOPIC_EVENT)
    for number in range(10_050):
        event = Event(seq=0, wall=1.0, kind="request.finished", text=f"n{number}")
        world.core.report(Happened(events=[event], first=number + 1))
    newest = until(lambda: seq if (seq := client.hello().event_seq) >= 10_050 else None, 10.0)
    welcome = client.hello()
    assert welcome.event_oldest == newest - 9999
    some = client.ask(Replay(nonce=3, after=newest - 5, until=newest - 2), socket=client.bulk)
    assert isinstance(some, Replayed) and some.nonce == 3 and not some.gone
    assert [event.seq for event in some.events] == [newest - 4, newest - 3, newest - 2]
    everything = client.ask(Replay(nonce=4, after=0), socket=client.bulk)
    assert everything.gone and len(everything.events) == 10_000 and everything.newest == newest
    assert client.ask(Replay(nonce=5, after=newest), socket=client.bulk).events == []
    assert client.ask(Replay(nonce=6, after=newest + 1), socket=client.bulk).gone, "another epoch's reader"


def test_fetches_of_two_consoles_with_one_nonce_do_not_mix(world):
    clients = [world.client(), world.client()]
    for name, client in zip(("r-a", "r-b"), clients, strict=True):
        client.say(Fetch(nonce=1, request=name, wait_ms=10**9), socket=client.bulk)
    with FakeTexts(world.context, world.config) as texts:
        questions = [texts.next(), texts.next()]
        assert questions[0].nonce != questions[1].nonce and questions[0].wait_ms == 60_000
        for question in reversed(questions):
            texts.say(
                Fetched(nonce=question.nonce, request=question.request, sample=0, offset=0, token_ids=[1],
                        text_offset=0, text="x", finished=False)
            )  # fmt: skip
    for name, client in zip(("r-a", "r-b"), clients, strict=True):
        found = client.hear(client.bulk)
        assert (found.nonce, found.request) == (1, name)


def test_stacks_are_asked_of_the_agent(world):
    client = world.client()
    answer = client.ask(Inspect(nonce=2, what="stacks"), socket=client.bulk)
    assert isinstance(answer, Failed) and "agent" in answer.text
    with world.context.socket(zmq.DEALER) as agent:
        agent.linger, agent.identity = 0, world.config.node_name.encode()
        agent.connect(world.config.endpoint("agent"))
        world.core.agent_report(sample(0))
        until(lambda: _asked(client, agent))


def _asked(client, agent):
    client.say(Inspect(nonce=9, what="stacks"), socket=client.bulk)
    if not agent.poll(100):
        assert isinstance(client.hear(client.bulk), Failed)
        return False
    question = frames.decode_as(Inspect, agent.recv())
    agent.send(frames.encode(Inspected(nonce=question.nonce, what="stacks", data=msgspec.Raw(b"\xc0"))))
    return client.hear(client.bulk).nonce == 9


def test_logs_are_tagged_and_cut(world):
    folder = Path(world.config.run_dir)
    (folder / "core.log").write_text("".join(f"line {n}\n" for n in range(5000)))
    (folder / "stage1.log").write_bytes(b"caf\xc3\xa9 \xff\nlast")
    client = world.client()
    answer = client.ask(Inspect(nonce=1, what="logs", lines=2), socket=client.bulk)
    assert frames.decode_as(LogsDetail, bytes(answer.data)).lines == [
        "core| line 4998", "core| line 4999", "stage1| café \ufffd", "stage1| last",
    ]  # fmt: skip
    answer = client.ask(Inspect(nonce=1, what="logs", stage=1), socket=client.bulk)
    assert len(frames.decode_as(LogsDetail, bytes(answer.data)).lines) == 2
    for stage in (-1, 9):
        answer = client.ask(Inspect(nonce=1, what="logs", stage=stage), socket=client.bulk)
        assert (answer.code, answer.text) == ("NOT_FOUND", f"no stage {stage}: this engine has 0 to 1")


def test_details_of_requests_are_asked_of_the_process_of_texts_and_others_of_the_core(world):
    client = world.client()
    client.say(Inspect(nonce=4, what="request", request="r-1"), socket=client.bulk)
    with FakeTexts(world.context, world.config) as texts:
        question = texts.next()
        assert (question.what, question.request) == ("request", "r-1")
        texts.say(Failed(nonce=question.nonce, code="NOT_FOUND", text="no request r-1"))
        assert client.hear(client.bulk) == Failed(nonce=4, code="NOT_FOUND", text="no request r-1")
        texts.say(Failed(nonce=question.nonce, code="NOT_FOUND", text="twice"))
        assert not client.bulk.poll(100), "a question is answered once"
    client.say(Inspect(nonce=5, what="finished"), socket=client.bulk)
    assert world.core.next().what == "finished"


def test_another_process_of_texts_gets_what_the_one_before_has_not_answered(world):
    client = world.client()
    client.say(Fetch(nonce=4, request="r-1"), socket=client.bulk)
    with FakeTexts(world.context, world.config, pid=77) as texts:
        first = texts.next()
    with FakeTexts(world.context, world.config, pid=78) as texts:
        assert texts.next() == first
        texts.say(Failed(nonce=first.nonce, code="NOT_FOUND", text="no request r-1"))
        assert client.hear(client.bulk) == Failed(nonce=4, code="NOT_FOUND", text="no request r-1")


# --- the end ------------------------------------------------------------------------------------------------


def test_sigterm_ends_in_order_and_leaves_the_files_to_the_supervisor(world):
    client = world.client(frames.TOPIC_SNAPSHOT, frames.TOPIC_EVENT)
    client.snapshot()
    world.process.terminate()
    assert world.process.wait(20) == 0
    until(lambda: client.snapshot().engine.state == "stopped")
    assert not client.state.poll(200) or client.snapshot().engine.state == "stopped", "that is the last word"
    assert Path(world.config.run_dir, "engine.json").exists()


def test_when_the_supervisor_is_gone_nothing_stays(world):
    stubborn = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    elsewhere = subprocess.Popen(["sleep", "60"])
    try:
        world.core.report(processes(stage_process(0, pid=stubborn.pid), stage_process(1, pid=elsewhere.pid)))
        # Stage 1 has ended, and its pid is another process's by now.
        world.core.report(
            processes(stage_process(0, pid=stubborn.pid), stage_process(1, pid=elsewhere.pid, exit_code=0))
        )
        client = world.client(frames.TOPIC_SNAPSHOT)
        until(lambda: client.snapshot().stages[1].state == "dead")
        world.line.close()
        assert stubborn.wait(20) == -signal.SIGKILL
        assert world.process.wait(20) == 0
        assert elsewhere.poll() is None
        assert not Path(world.config.run_dir).exists() and not Path(world.config.ring_dir).exists()
    finally:
        for process in (stubborn, elsewhere):
            process.kill()
            process.wait()


def test_an_audit_folder_that_cannot_be_written_is_told_in_one_line(tmp_path):
    config = make_config()
    (tmp_path / "file").write_text("")
    with started(GATEWAY, config, PPCONSOLE_AUDIT_DIR=str(tmp_path / "file")) as (process, _):
        assert process.wait(30) == 1
    remove(config)


def test_stop_without_a_core_ends_the_supervisor_and_nobody_else(world):
    client = world.client()
    gone = ProcessInfo(role="core", stage=None, rank=None, pid=99, exit_code=1)
    stranger = ProcessInfo(role="supervisor", stage=None, rank=None, pid=1)
    world.core.report(processes(stranger, gone))
    answer = until(lambda: _no_core(client, Stop()))
    assert "supervisor is not known" in answer.text
    asked = []
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    try:
        # This test is the gateway's parent, as the supervisor would be.
        world.core.report(processes(msgspec.structs.replace(stranger, pid=os.getpid()), gone))
        plan = until(lambda: _end(client, Stop(), dry_run=True))
        assert plan.state == "planned" and asked == []
        client.say(client.command(Stop(), "c1"))
        assert isinstance(client.hear(), Accepted) and client.hear().state == "applied"
        until(lambda: asked)
    finally:
        signal.signal(signal.SIGTERM, before)


def _no_core(client, verb):
    reply = client.ask(client.command(verb, f"c{time.monotonic_ns()}", dry_run=True))
    return reply if isinstance(reply, Refused) and "supervisor" in reply.text else None


def _end(client, verb, **more):
    reply = client.ask(client.command(verb, f"c{time.monotonic_ns()}", **more))
    return reply if isinstance(reply, Outcome) else None


def test_reports_of_a_core_make_the_view(world):
    client = world.client(frames.TOPIC_SNAPSHOT)
    world.core.report(core_report(world.config, stages=[view(0, binding=True), view(1)], requests_total=12))
    assert until(lambda: client.snapshot().requests_total == 12)


def test_a_gateway_that_leaves_answers_what_is_open(world):
    client = world.client()
    client.say(client.command(Stop(), "c1"))
    world.core.next()
    client.say(client.command(Resume(), "c2"))
    world.core.next()
    world.process.send_signal(signal.SIGTERM)
    ends = [client.hear() for _ in range(2)]
    assert [(end.id, getattr(end, "state", None) or end.code) for end in ends] == [("c1", "applied"), ("c2", "NO_CORE")]
