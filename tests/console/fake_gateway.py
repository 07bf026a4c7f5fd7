"""A small engine behind real sockets: a thread that speaks the public protocol, and that tests can make misbehave.

    with FakeGateway() as fake:               # uses $XDG_RUNTIME_DIR, writes a discovery record
        fake.event("stage.dead", "stage 2 is dead")
        fake.silent = True                     # no snapshots: stale
        fake.deaf = True                       # answers nothing on control and bulk
    fake.coreless = True                   # fetches are refused: the core has ended
        fake.lose_events(5)                    # numbered, kept in the ring, not published
        fake.restart()                         # the same endpoints, a new epoch
        fake.stop() / fake.start()             # gone, record removed / back

`fake.answers[Abort] = lambda command: [Refused(...)]` replaces what a verb is answered with; `fake.commands` has all.
By itself it acts like an engine of two stages: `submit` streams `fake.words`, effects change `fake.snapshot`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import snapshots
import zmq
from ppconsole.link.keypair import make_keypair
from ppengine.protocol.control import (
    Accepted,
    Command,
    Conflict,
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
    ToBulk,
    ToGateway,
    Welcome,
)
from ppengine.protocol.discovery import EngineRecord, process_start, remove_engine, runtime_dir, write_record
from ppengine.protocol.frames import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    TOPIC_EVENT,
    TOPIC_HEARTBEAT,
    TOPIC_SNAPSHOT,
    TOPIC_SNAPSHOT_PACKED,
    TOPIC_SNAPSHOT_SLOW,
    Codec,
    decode_header,
    encode,
    header,
    pack,
    split,
)
from ppengine.protocol.inspection import (
    BlocksDetail,
    FinishedDetail,
    FinishedInfo,
    LogsDetail,
    RequestDetail,
    StacksDetail,
    StageStacks,
)
from ppengine.protocol.past_files import CAPABILITY, ListPast, ReadPast
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.severity import is_at_least
from ppengine.protocol.snapshot import (
    EngineInfo,
    Event,
    Events,
    Queues,
    RequestInfo,
    Snapshot,
    Throughput,
    Verdict,
    Why,
)
from ppengine.protocol.stage_info import (
    CordonInfo,
    DeviceInfo,
    KvBlocks,
    StageInfo,
    StageMemory,
    StepMs,
    StreamInfo,
    SwapBlocks,
    Waiting,
)
from ppengine.protocol.verb_table import ROWS, Role, covers
from ppengine.protocol.verbs import (
    Abort,
    Continue,
    Cordon,
    Drain,
    Many,
    Pause,
    Preempt,
    Release,
    RequestVerb,
    RestartStage,
    Resume,
    SetMemory,
    Submit,
    SwapIn,
    SwapOut,
    label_of,
    row_of,
)

MIB = 1024 * 1024
Answer = Accepted | Deferred | Outcome | Refused
Answerer = Callable[[Command], list[Answer]]


def sample_stage(index: int, stages: int = 2, **changes: Any) -> StageInfo:
    """Return one stage with plausible figures."""
    stage = StageInfo(
        index=index,
        tensor_rank=0,
        state="computing",
        pid=1000 + index,
        host="n0",
        layers=[index * 4, index * 4 + 4],
        device=DeviceInfo(kind="cpu", name="CPU"),
        sample_age_ms=40.0,
        progress_age_ms=12.0,
        inbox=1,
        outbox=0,
        micro_batches=[7 + index],
        step_ms=StepMs(p50=21.5, p99=30.0),
        idle_fraction=0.25,
        memory=StageMemory(
            total=64 * MIB, limit=57 * MIB, used=40 * MIB, weights=8 * MIB, kv_mapped=30 * MIB, kv_reserved=50 * MIB,
            other=2 * MIB,
        ),
        kv_blocks=KvBlocks(used=60, cached=10, free=30, mapped=100, capacity=120 + index, binding=index == 0),
        swap_blocks=SwapBlocks(total=64, used=4),
        streams=[StreamInfo(name="main", owner="step loop", op="forward m7", age_ms=12.0, pending=1)],
        op=f"forward m{7 + index}",
    )  # fmt: skip
    return msgspec.structs.replace(stage, **changes)


def sample_request(identity: str, **changes: Any) -> RequestInfo:
    """Return one running request."""
    request = RequestInfo(
        id=identity, owner="alice", state="running", age_s=4.1, prompt_tokens=51, output_tokens=20, blocks=5,
        swap_blocks=0, revision=1,
    )  # fmt: skip
    return msgspec.structs.replace(request, **changes)


def sample_snapshot(stages: int = 2, requests: list[RequestInfo] | None = None, **engine: Any) -> Snapshot:
    """Return a serving engine with three requests: one runs, one waits, one is held."""
    if requests is None:
        waits = Why(code="blocks", need=44, have=40, text="need 44, have 40")
        held = Why(code="held", text="swap-out by eve")
        requests = [
            sample_request("r-8f2c"),
            sample_request(
                "r-19aa", owner="bob", state="waiting", prompt_tokens=700, blocks=0, output_tokens=0, why=waits
            ),
            sample_request("r-77d0", state="held", blocks=0, swap_blocks=18, why=held),
        ]
    info = EngineInfo(
        id="f00d", name="fake", epoch="e", state="serving", model="tiny", pipeline_parallel_size=stages,
        tensor_parallel_size=1, executor="local", memory_utilization=0.9, memory_revision=7, uptime_s=61.0,
        step=18412, retired_step=18410, max_model_len=1024, max_num_seqs=64, consoles=1,
    )  # fmt: skip
    snapshot = Snapshot(
        sampled_at=time.time(),
        engine=msgspec.structs.replace(info, **engine),
        stages=[sample_stage(index, stages) for index in range(stages)],
        requests=requests,
        requests_total=len(requests),
        throughput=Throughput(prompt_tok_s=120.0, output_tok_s=345.6),
        core_age_ms=30.0,
    )
    count_queues(snapshot)
    return snapshot


def stuck_snapshot() -> Snapshot:
    """Return four stages of which stage 2 is stopped, with the verdicts about all."""
    snapshot = sample_snapshot(4, state="degraded")
    for index, state in ((0, "blocked"), (1, "blocked"), (2, "stopped"), (3, "starved")):
        snapshot.stages[index].state = state  # type: ignore[assignment]
        snapshot.stages[index].progress_age_ms = 6200.0
    snapshot.stages[1].waiting_on = Waiting(stage=2, what="send", since_ms=6100.0)
    snapshot.stages[3].waiting_on = Waiting(stage=2, what="receive", since_ms=6100.0)
    snapshot.verdicts = [
        Verdict(
            stage=2,
            cause="stopped",
            summary="stage 2 was stopped by a signal; 0, 1 blocked; 3 starved",
            since_s=6.2,
            evidence=["/proc/1002/stat: state T", "no step retired for 6.2 s"],
            suggest="ppconsole continue 2",
        ),
        Verdict(stage=3, cause="starved", summary="stage 3 waits for stage 2", since_s=6.1, root=False),
    ]
    return snapshot


def count_queues(snapshot: Snapshot) -> None:
    """Make `queues` agree with `requests`."""
    states = [request.state for request in snapshot.requests]
    snapshot.queues = Queues(**{name: states.count(name) for name in Queues.__struct_fields__})


class FakeGateway:
    """See the module. Everything that touches a socket runs in the thread."""

    def __init__(self, name: str = "fake", snapshot: Snapshot | None = None, *, hz: float = 20.0) -> None:
        self.id = f"f{secrets.token_hex(3)}"
        self.name = name
        self.hz = hz
        self.snapshot = snapshot or sample_snapshot()
        self.silent = self.deaf = self.coreless = self.loses = False
        self.overdue = 0
        """Fetches that are answered as overdue."""
        self.words = ["Once", " upon", " a", " time", " there", " was", " a", " fox."]
        self.word_s = 0.02
        self.commands: list[Command] = []
        self.hellos: list[Hello] = []
        self.goodbyes = 0
        self.pings = 0
        """Those that came. A console that pings is attached."""
        self.replays: list[Replay] = []
        self.answers: dict[type, Answerer] = {}
        self.ring = 10_000
        self.slow_published = 0
        """Snapshots on the slow topic."""
        self.finished: list[FinishedInfo] = []
        self.past: Callable[[ListPast | ReadPast], msgspec.Struct] | None = None
        """Answers questions about the past; None: a gateway of an earlier version."""
        self.asked = 0
        """Fetches that came."""
        self.role: Role = "admin"
        """Rights of every console; a change is reported with the next answer to a ping."""
        self.pid = os.getpid()
        self.keypair = make_keypair()
        self.epoch = ""
        self._outputs: dict[str, tuple[float, str, int]] = {}
        self._aborted: set[str] = set()
        self._waiting_fetches: list[tuple[float, bytes, Fetch]] = []
        self._thread: threading.Thread | None = None
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._control_codec, self._bulk_codec = Codec(ToGateway), Codec(ToBulk)

    def __enter__(self) -> FakeGateway:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- what tests do -------------------------------------------------------------------------------------

    def start(self, epoch: str | None = None) -> None:
        """Bind, publish the record, begin."""
        self.epoch = epoch or secrets.token_hex(8)
        self.events: list[Event] = []
        self.snapshot.engine.id, self.snapshot.engine.name, self.snapshot.engine.epoch = self.id, self.name, self.epoch
        folder = runtime_dir() / self.id
        folder.mkdir(mode=0o700, exist_ok=True)
        self._halt = False
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(str(folder), ready), daemon=True)
        self._thread.start()
        assert ready.wait(60)
        self.record = EngineRecord(
            id=self.id, name=self.name, epoch=self.epoch, pid=self.pid, pid_start=process_start(self.pid) or 0,
            state_endpoint=f"ipc://{folder}/state", control_endpoint=f"ipc://{folder}/control",
            bulk_endpoint=f"ipc://{folder}/bulk", proto=PROTOCOL, model=self.snapshot.engine.model,
            pipeline_parallel_size=len(self.snapshot.stages), run_dir=str(folder), started_wall=time.time(),
            server_key=self.keypair.public,
        )  # fmt: skip
        write_record(self.record)

    def stop(self) -> None:
        """Close the sockets and remove the record."""
        if self._thread is not None:
            self._halt = True
            self._thread.join(10)
            self._thread = None
        remove_engine(self.id)

    def end(self) -> None:
        """Publish one last picture and close at once."""
        self.silent = True

        def last() -> None:
            self.snapshot.engine.state = "stopped"
            self._publish(TOPIC_SNAPSHOT, self.snapshot, 1_000_000)
            self._halt = True

        self._todo.put(last)

    def restart(self) -> None:
        """Come back at once at the same place with a new epoch and no history."""
        self.stop()
        self.start()

    def event(self, kind: str, text: str, *, publish: bool = True, **fields: Any) -> Event:
        """Number an event, keep it, and publish it."""
        event = Event(seq=len(self.events) + 1, wall=time.time(), kind=kind, text=text, **fields)
        self.events.append(event)
        self.snapshot.event_seq = event.seq
        if publish:
            self._todo.put(lambda: self._publish(TOPIC_EVENT, Events([event]), event.seq))
        return event

    def lose_events(self, count: int) -> None:
        """Number events and keep them, but publish none: what a full pipe does."""
        for _ in range(count):
            self.event("test.lost", "not published", publish=False)

    # --- the thread ----------------------------------------------------------------------------------------

    def _serve(self, folder: str, ready: threading.Event) -> None:
        context = zmq.Context()
        self._state, self._control, self._bulk = (
            context.socket(kind) for kind in (zmq.XPUB, zmq.ROUTER, zmq.ROUTER)
        )  # fmt: skip
        try:
            for name, socket in (("state", self._state), ("control", self._control), ("bulk", self._bulk)):
                socket.linger = 0
                socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
                socket.curve_server = True  # without a ZAP handler: any key is accepted
                socket.curve_secretkey = bytes.fromhex(self.keypair.secret)
                socket.bind(f"ipc://{folder}/{name}")
            self._state.setsockopt(zmq.XPUB_VERBOSE, 1)
            ready.set()
            self._loop()
        finally:
            context.destroy(linger=0)

    def _loop(self) -> None:
        poller = zmq.Poller()
        for socket in (self._state, self._control, self._bulk):
            poller.register(socket, zmq.POLLIN)
        due, slow_due, sequence = 0.0, 0.0, 0
        while not self._halt:
            ready = dict(poller.poll(5))
            if self._state in ready:
                self._state.recv_multipart()
            if self._control in ready:
                self._on_control(*self._control.recv_multipart())
            if self._bulk in ready:
                self._on_bulk(*self._bulk.recv_multipart())
            with contextlib.suppress(queue.Empty):
                while True:
                    self._todo.get_nowait()()
            now = time.monotonic()
            if now >= due and not self.silent:
                due, sequence = now + 1 / self.hz, sequence + 1
                self._advance()
                self._publish(TOPIC_SNAPSHOT, self.snapshot, sequence)
                if now >= slow_due:
                    slow_due = now + 1
                    self.slow_published += 1
                    self._publish(TOPIC_SNAPSHOT_SLOW, self.snapshot, sequence)
                    self._publish(TOPIC_SNAPSHOT_PACKED, self.snapshot, sequence)
                    self._publish(TOPIC_HEARTBEAT, None, 0)
            self._answer_fetches(now)

    def _advance(self) -> None:
        self.snapshot.sampled_at = time.time()
        self.snapshot.engine.uptime_s += 1 / self.hz

    def _publish(self, topic: bytes, message: msgspec.Struct | None, seq: int) -> None:
        head = encode(header(self.id, self.epoch, topic.decode(), seq))
        body = b"" if message is None else encode(message)
        body = pack(body) if topic == TOPIC_SNAPSHOT_PACKED else body
        self._state.send_multipart([topic, head, body], zmq.NOBLOCK)

    def _send(self, socket: zmq.Socket[bytes], to: bytes, message: msgspec.Struct) -> None:
        socket.send_multipart([to, encode(header(self.id, self.epoch)), encode(message)])

    def _on_control(self, to: bytes, *frames: bytes) -> None:
        head, body = split(frames)
        decode_header(head)
        message = self._control_codec.decode(body)
        if self.deaf:
            return
        if isinstance(message, Hello):
            self.hellos.append(message)
            self._send(self._control, to, self._welcome(message))
        elif isinstance(message, Goodbye):
            self.goodbyes += 1
        elif isinstance(message, Ping):
            self.pings += 1
            step = self.snapshot.engine.step
            self._send(self._control, to, Pong(nonce=message.nonce, step=step, core_age_ms=5.0, role=self.role))
        elif isinstance(message, Command):
            self.commands.append(message)
            for answer in self._answer(message):
                self._send(self._control, to, answer)

    def _welcome(self, hello: Hello) -> Welcome:
        return Welcome(
            proto=PROTOCOL, role="viewer" if hello.read_only else self.role, engine=self.id, name=self.name,
            epoch=self.epoch, event_seq=len(self.events), event_oldest=max(1, len(self.events) - self.ring + 1),
            max_frame_bytes=MAX_FRAME_BYTES, capabilities=[] if self.past is None else [CAPABILITY],
        )  # fmt: skip

    def _answer(self, command: Command) -> list[Answer]:
        if command.epoch != self.epoch:
            text = f"epoch {command.epoch} has ended; {self.epoch} runs"
            return [Refused(id=command.id, code="STALE_EPOCH", text=text)]
        name = row_of(command.verb).name
        if not covers(self.role, ROWS[name].role):
            text = f"key fake is {self.role}, {name} needs {ROWS[name].role}: {name} is refused"
            return [Refused(id=command.id, code="DENIED", text=text)]
        return self.answers.get(type(command.verb), self._act)(command)

    def _act(self, command: Command) -> list[Answer]:
        """Do what a verb says to `snapshot`, roughly."""
        verb, op = command.verb, f"op-{len(self.commands)}"
        if isinstance(verb, Submit):
            return self._submit(command, verb, op)
        if isinstance(verb, Many):
            return self._act_on_many(command, verb, op)
        request = None
        if isinstance(verb, RequestVerb):
            request = next((row for row in self.snapshot.requests if row.id == verb.request), None)
            if request is None:
                text = f"no request {verb.request!r}; {len(self.snapshot.requests)} are here"
                return [Refused(id=command.id, code="NOT_FOUND", text=text)]
            if command.if_rev is not None and command.if_rev != request.revision:
                text = f"{request.id} is at revision {request.revision}, not {command.if_rev}"
                return [Refused(id=command.id, code="CONFLICT", text=text)]
        if isinstance(verb, SetMemory) and verb.utilization < 0.2:
            text = f"utilization {verb.utilization:g} leaves 3 blocks; one sequence needs 16: at least 0.21"
            return [Refused(id=command.id, code="DOES_NOT_FIT", text=text)]
        name = str(type(verb).__struct_config__.tag)
        if command.dry_run:
            plan = [f"would {name}", "moves 3 blocks"]
            outcome = Outcome(id=command.id, op=op, state="planned", text=f"{name} planned", plan=plan)
            outcome.figures = {"move": 3.0}
            return [outcome]
        self._change(verb, request)
        self.event("op.applied", f"{name} applied", by=command.by, op=op, request=request.id if request else None)
        revision = self.snapshot.engine.memory_revision if isinstance(verb, SetMemory) else None
        return [
            Accepted(id=command.id, op=op),
            Deferred(id=command.id, op=op, text="in flight at stage 1"),
            Outcome(id=command.id, op=op, state="applied", text=f"{name} applied", step=18413, revision=revision),
        ]

    def _act_on_many(self, command: Command, many: Many, op: str) -> list[Answer]:
        """Do a verb to the requests that are here; the others, and those of another revision, are conflicts."""
        here = {row.id: row for row in self.snapshot.requests}
        seen = dict(zip(many.requests, many.revisions or [None] * len(many.verbs), strict=True))
        conflicts = [
            Conflict(request=name, code="CONFLICT" if name in here else "NOT_FOUND", text=f"no such {name}")
            for name, revision in seen.items()
            if name not in here or revision not in (None, here[name].revision)
        ]
        name = label_of(many)
        done = [verb for verb in many.verbs if verb.request not in {each.request for each in conflicts}]
        text = f"{len(done)} of {len(seen)} requests"
        outcome = Outcome(id=command.id, op=op, state="planned", text=text, conflicts=conflicts)
        if command.dry_run:
            outcome.plan, outcome.figures = [f"{name} {text}", "3 blocks come back"], {"blocks_back": 3.0}
            return [outcome]
        for verb in done:
            self._change(verb, here[verb.request])
        outcome.state = "applied" if done else "failed"
        self.event(f"op.{outcome.state}", text, by=command.by, op=op)
        return [Accepted(id=command.id, op=op), outcome]

    def _change(self, verb: Any, request: RequestInfo | None) -> None:
        engine = self.snapshot.engine
        if request is not None:
            request.revision += 1
        if isinstance(verb, Abort) and request is not None:
            self._aborted.add(request.id)
            self.snapshot.requests.remove(request)
        elif isinstance(verb, SwapOut | Preempt) and request is not None:
            swap = isinstance(verb, SwapOut) or verb.mode == "swap"
            request.state = "held" if verb.hold else "swapped" if swap else "waiting"
            request.swap_blocks, request.blocks = request.blocks if swap else 0, 0
        elif isinstance(verb, SwapIn | Release) and request is not None:
            request.state = "running"
            request.blocks, request.swap_blocks = request.swap_blocks, 0
        elif isinstance(verb, SetMemory):
            engine.memory_utilization, engine.memory_revision = verb.utilization, engine.memory_revision + 1
        elif isinstance(verb, Pause):
            engine.state = "paused"
        elif isinstance(verb, Drain):
            engine.state = "serving" if verb.undo else "draining"
        elif isinstance(verb, Cordon):
            stage = self.snapshot.stages[verb.stage]
            stage.cordon = None if verb.undo else CordonInfo(by="eve", since_s=0.0)
        elif isinstance(verb, Resume | Continue | RestartStage):
            engine.state = "serving"
        count_queues(self.snapshot)

    def _submit(self, command: Command, verb: Submit, op: str) -> list[Answer]:
        identity = verb.request or f"r-{secrets.token_hex(2)}"
        if verb.prompt is not None and len(verb.prompt) > 1000:
            text = f"{len(verb.prompt)} tokens and 16 outputs; the longest sequence is 1024"
            return [Refused(id=command.id, code="DOES_NOT_FIT", text=text)]
        if command.dry_run:
            return [Outcome(id=command.id, op=op, state="planned", text="fits", plan=["4 tokens, 2 blocks"])]
        limit = verb.sampling.max_tokens
        count = len(self.words) if limit is None else min(limit, len(self.words))
        reason = "stop" if count == len(self.words) else "length"
        self._outputs[identity] = (time.monotonic(), reason, count)
        self.snapshot.requests.append(sample_request(identity, owner=command.by, prompt_tokens=4, output_tokens=0))
        count_queues(self.snapshot)
        return [
            Accepted(id=command.id, op=op, request=identity),
            Outcome(id=command.id, op=op, state="applied", text=f"{identity} waits", request=identity),
        ]

    def _on_bulk(self, to: bytes, *frames: bytes) -> None:
        head, body = split(frames)
        decode_header(head)
        message = self._bulk_codec.decode(body)
        if self.deaf:
            return
        if isinstance(message, Replay):
            self.replays.append(message)
            until = len(self.events) if message.until is None else message.until
            oldest = max(1, len(self.events) - self.ring + 1)
            found = [event for event in self.events if max(message.after, oldest - 1) < event.seq <= until]
            gone = message.after + 1 < oldest
            if message.level is not None:
                of_level = [event for event in self.events if message.after < event.seq <= until]
                found, gone = [event for event in of_level if is_at_least(event, message.level)], False
            self._send(self._bulk, to, Replayed(nonce=message.nonce, events=found, newest=len(self.events), gone=gone))
        elif isinstance(message, Fetch):
            self.asked += 1
            self._waiting_fetches.append((time.monotonic() + message.wait_ms / 1000, to, message))
        elif isinstance(message, Inspect):
            self._send(self._bulk, to, self._inspect(message))
        elif isinstance(message, ListPast | ReadPast) and self.past is not None:
            self._send(self._bulk, to, self.past(message))

    def _answer_fetches(self, now: float) -> None:
        rest = []
        for deadline, to, fetch in self._waiting_fetches:
            answer = self._fetched(fetch, now)
            if isinstance(answer, Fetched) and not (answer.token_ids or answer.finished) and now < deadline:
                rest.append((deadline, to, fetch))
            elif not self.deaf:
                self._send(self._bulk, to, answer)
        self._waiting_fetches = rest

    def _fetched(self, fetch: Fetch, now: float) -> Fetched | Failed:
        if self.overdue:
            self.overdue -= 1
            return Failed(nonce=fetch.nonce, code="EXPIRED", text="the core gave no answer in time")
        if self.coreless:
            return Failed(nonce=fetch.nonce, code="NO_CORE", text="the engine core has ended: killed by SIGKILL")
        if fetch.request not in self._outputs:
            return Failed(nonce=fetch.nonce, code="NOT_FOUND", text=f"no output of {fetch.request!r} is kept")
        begun, reason, count = self._outputs[fetch.request]
        have = min(count, int((now - begun) / self.word_s))
        aborted = fetch.request in self._aborted
        finished = aborted or have == count
        text = "".join(self.words[:have])
        return Fetched(
            nonce=fetch.nonce, request=fetch.request, sample=fetch.sample, offset=fetch.offset,
            token_ids=list(range(fetch.offset, have)), text_offset=fetch.text_offset, text=text[fetch.text_offset :],
            finished=finished,
            finish_reason=("abort" if aborted else "lost" if self.loses else reason) if finished else None,
            prompt_tokens=4,
            state="finished" if finished else "running",
        )  # fmt: skip

    def _inspect(self, question: Inspect) -> Inspected | Failed:
        detail: msgspec.Struct
        if question.what == "request":
            row = next((row for row in self.snapshot.requests if row.id == question.request), None)
            if row is None:
                return Failed(nonce=question.nonce, code="NOT_FOUND", text=f"no request {question.request!r}")
            detail = RequestDetail(
                id=row.id, owner=row.owner, state=row.state, why=row.why.text if row.why else "",
                prompt_tokens=row.prompt_tokens, output_tokens=row.output_tokens, computed_tokens=70, cached_tokens=16,
                block_table=[3, 4, 9], shared_blocks=[3], host_blocks=[], in_flight=[18412],
                sampling=SamplingParams(temperature=0.0), revision=row.revision, age_s=row.age_s, queued_s=0.02,
                first_token_s=0.11, inter_token_ms=22.0, output_text="the stage then",
                history=["0.000s > waiting", "0.012s waiting > running"],
            )  # fmt: skip
        elif question.what == "stacks":
            stages = [stage.index for stage in self.snapshot.stages]
            if question.stage is not None and question.stage not in stages:
                text = f"no stage {question.stage}; 0 to {len(stages) - 1} are here"
                return Failed(nonce=question.nonce, code="NOT_FOUND", text=text)
            chosen = stages if question.stage is None else [question.stage]
            stacks = [StageStacks(stage=index, pid=1000 + index, text="forward (runner.py:10)") for index in chosen]
            detail = StacksDetail(stages=stacks)
        elif question.what == "logs":
            lines = [f"stage {stage.index}: ready" for stage in self.snapshot.stages]
            detail = LogsDetail(
                lines=[line for line in lines if question.stage is None or f" {question.stage}:" in line]
            )
        elif question.what == "finished":
            detail = FinishedDetail(requests=self.finished)
        elif question.what == "ledger":
            detail = snapshots.ledger()
        else:
            detail = BlocksDetail(mapped=100, runs=[(1, "null"), (60, "used"), (39, "free")])
        return Inspected(nonce=question.nonce, what=question.what, data=msgspec.Raw(encode(detail)))
