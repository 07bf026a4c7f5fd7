"""What the tests of agent and gateway need: an engine's folder, reports, a core and a console made of plain sockets."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
import pytest
import zmq
from ppengine.common import lifeline
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.curve import be_client, make_keypair
from ppengine.common.profile_sections import ConsoleConfig, MemoryConfig, ModelConfig, ParallelConfig
from ppengine.common.ring import Kind, Record
from ppengine.diagnosis.evidence import StageEvidence
from ppengine.gateway.keyring import Principal
from ppengine.protocol import frames
from ppengine.protocol.control import Command, FromBulk, FromGateway, Hello
from ppengine.protocol.discovery import runtime_dir
from ppengine.protocol.keys import Keypair, own_keypair, public_key
from ppengine.protocol.offline import ToFront
from ppengine.protocol.reports import CoreReport, ProcessInfo, ProcessReport, StageView
from ppengine.protocol.snapshot import EngineInfo, Queues, Snapshot, Throughput
from ppengine.protocol.stage_samples import AgentReport, StageSample
from ppengine.protocol.text_messages import TextsAlive, ToTexts

MIB = 1024 * 1024
PRINCIPAL = Principal("0" * 64, "owner", "admin")
"""The user who runs the engine."""
T = TypeVar("T")


TRIES = 3
"""How often a promise of time is tried: the best try judges the program, the others what else the machine did."""


def until(look: Callable[[], T], timeout: float = 60.0, what: str = "") -> T:
    """Return the first true answer of `look`; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout:g} s: {what or look}")
        time.sleep(0.005)


def make_config(stages: int = 2, publish_hz: float = 10.0, listen: str | None = None) -> EngineConfig:
    """Return the configuration of an engine whose folders are made in the runtime folder."""
    identity = f"t{os.getpid()}-{time.monotonic_ns() % 10**9}"
    run_dir = runtime_dir() / identity
    run_dir.mkdir(mode=0o700)
    rings = Path("/dev/shm") / f"ppconsole-{os.getuid()}-{identity}"
    rings.mkdir(mode=0o700)
    profile = Profile(
        name="test",
        model=ModelConfig(path="/models/none"),
        parallel=ParallelConfig(pipeline=stages),
        memory=MemoryConfig(utilization=0.5, device_mib=64),
        console=ConsoleConfig(publish_hz=publish_hz, listen=listen),
    )
    config = EngineConfig(
        id=identity, name="test", epoch="epoch-1", profile=profile, model_path="/models/none", model_type="llama",
        layers=[(k * 2, k * 2 + 2) for k in range(stages)], max_model_len=128, run_dir=str(run_dir),
        ring_dir=str(rings), started_wall=time.time(),
    )  # fmt: skip
    (run_dir / "engine.json").write_bytes(msgspec.json.encode(config))
    return config


def remove(config: EngineConfig) -> None:
    """Remove the folders of `make_config`."""
    shutil.rmtree(config.run_dir, ignore_errors=True)
    shutil.rmtree(config.ring_dir, ignore_errors=True)


@contextlib.contextmanager
def started(module: str, config: EngineConfig, **environ: str) -> Iterator[tuple[subprocess.Popen[bytes], BinaryIO]]:
    """Run a module of the engine with a lifeline; yield its process and the end to close. Killed at the end.

    The end is a file, which a test may close: a descriptor that is closed twice may be a socket's of ZeroMQ by then.
    """
    read_end, write_end = lifeline.open_pipe()
    line = os.fdopen(write_end, "wb", buffering=0)
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--engine", f"{config.run_dir}/engine.json", "--lifeline", str(read_end)],
        pass_fds=(read_end,), env={**os.environ, **environ},
    )  # fmt: skip
    os.close(read_end)
    try:
        yield process, line
    finally:
        process.kill()
        process.wait()
        line.close()


# --- reports and records ------------------------------------------------------------------------------------


def record(seq: int, kind: Kind, begin_ms: float, end_ms: float = 0.0, **more: int) -> Record:
    """Return one ring record; times in ms, `end_ms` 0: open."""
    fields = {"peer": -1, "step": 0, "returned_ns": 0, "size": 0, "detail": 0, "code": 0} | more
    return Record(
        seq=seq, kind=kind, enqueued_ns=int(begin_ms * 1e6), done_ns=int(end_ms * 1e6), stream=0,
        generation=0, **fields,
    )  # fmt: skip


def sample(index: int, **changes: Any) -> StageSample:
    """Return a healthy stage that waits for a step."""
    base = StageSample(
        index=index, rank=0, pid=1000 + index, process_state="S", process_start=1, phase="serving",
        phase_age_ms=60_000.0, progress_age_ms=5.0, tick_age_ms=50.0, op="idle", op_age_ms=5.0, op_step=0, op_peer=None,
        waiting_on=None, inbox=0, outbox=0, begun_step=7, finished_step=7, micro_batches=[],
        step_ms_p50=1.0,        step_ms_p99=2.0, idle_fraction=0.5,
        gauges={
            "total_bytes": 64 * MIB, "weights_bytes": 4 * MIB, "kv_mapped_bytes": 20 * MIB,
            "kv_reserved_bytes": 60 * MIB, "other_bytes": MIB, "mapped_blocks": 100,
        },
        kv_resident=MIB, streams=[], timeline=[],
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def view(index: int, **changes: Any) -> StageView:
    """Return what the core says of a healthy, idle stage."""
    base = StageView(
        index=index, rank=0, ready=True, retired_step=7, oldest_unretired_age_ms=None, capacity=120, mapped=100,
        total_bytes=64 * MIB, weights_bytes=4 * MIB, pid=1000 + index, host="n0", device_name="CPU", swap_blocks=64,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def core_report(config: EngineConfig, **changes: Any) -> CoreReport:
    """Return a report of a core that serves and has nothing to do."""
    engine = EngineInfo(
        id=config.id, name=config.name, epoch=config.epoch, state="serving", model="none",
        pipeline_parallel_size=config.stages, tensor_parallel_size=1, executor="local", memory_utilization=0.5,
        memory_revision=3, uptime_s=1.0, step=7, retired_step=7,
    )  # fmt: skip
    base = CoreReport(
        mono_ns=time.monotonic_ns(), engine=engine, stages=[view(k) for k in range(config.stages)], queues=Queues(),
        requests_total=0, requests=[], operations=[], throughput=Throughput(), kv_used=10, kv_cached=5, kv_free=85,
        swap_used=0, steps_in_flight=[], preemptions_total=0, prefix_hit_tokens_total=0,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def processes(*infos: ProcessInfo) -> ProcessReport:
    """Return a report of the supervisor."""
    return ProcessReport(mono_ns=time.monotonic_ns(), processes=list(infos))


def stage_process(index: int, **changes: Any) -> ProcessInfo:
    """Return one stage process that runs."""
    return msgspec.structs.replace(ProcessInfo(role="stage", stage=index, rank=0, pid=1000 + index), **changes)


def stage(index: int, **changes: Any) -> StageEvidence:
    """Return the evidence of a healthy, idle stage."""
    base = StageEvidence(
        stage=index, pid=1000 + index, process_state="S", phase="serving", phase_age_s=60.0, sample_age_s=0.05,
        op="idle", op_age_s=0.1, progress_age_s=0.1, finished_step=7, retired_step=7,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


# --- peers --------------------------------------------------------------------------------------------------


class FakeCore:
    """The core's sockets: says that it serves, keeps what comes on `front`, answers as a test wants."""

    def __init__(self, context: zmq.Context[Any], config: EngineConfig) -> None:
        self.config = config
        self.front = context.socket(zmq.ROUTER)
        self.front.linger = 0
        self.front.bind(config.endpoint("front"))
        self.collect, self.newest = context.socket(zmq.PUSH), context.socket(zmq.PUSH)
        for socket, name in ((self.collect, "collect"), (self.newest, "report")):
            socket.linger = 0
            socket.connect(config.endpoint(name))
        self._codec = frames.Codec(ToFront)

    def report(self, message: msgspec.Struct | None = None, **changes: Any) -> None:
        """Push a report of any kind to the gateway; without one, the core's own."""
        message = message or core_report(self.config, **changes)
        socket = self.newest if isinstance(message, CoreReport) else self.collect
        socket.send(frames.encode(message))

    def agent_report(self, *samples: StageSample, node: str | None = None) -> None:
        """Push what an agent would."""
        self.report(AgentReport(mono_ns=time.monotonic_ns(), node=node or os.uname().nodename, stages=list(samples)))

    def next(self, timeout: float = 60.0) -> Any:
        """Return the next message on `front`, reporting meanwhile."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.front.poll(20):
                self.client, body = self.front.recv_multipart()
                return self._codec.decode(body)
            self.report()
        pytest.fail("nothing came on front")

    def nothing(self, ms: int = 100) -> bool:
        """Return whether nothing comes on `front` for a while."""
        return not self.front.poll(ms)

    def answer(self, message: msgspec.Struct) -> None:
        """Answer the last client."""
        self.front.send_multipart([self.client, frames.encode(message)])

    def close(self) -> None:
        """Close all sockets."""
        self.front.close()
        self.collect.close()
        self.newest.close()


class FakeTexts:
    """The socket of the process of texts: keeps what comes, and answers as a test wants."""

    def __init__(self, context: zmq.Context[Any], config: EngineConfig, pid: int = 77) -> None:
        self._pid = pid
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.identity = b"texts"
        self.socket.connect(config.endpoint("texts"))
        self._codec = frames.Codec(ToTexts)
        self.say(TextsAlive(pid=pid))

    def say(self, message: msgspec.Struct) -> None:
        """Send a message to the gateway."""
        self.socket.send(frames.encode(message))

    def next(self, timeout: float = 60.0) -> Any:
        """Return the next message, with signs of life meanwhile."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.socket.poll(100):
                return self._codec.decode(self.socket.recv())
            self.say(TextsAlive(pid=self._pid))
        pytest.fail("nothing came to the process of texts")

    def __enter__(self) -> FakeTexts:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


class Client:
    """A console's sockets."""

    def __init__(
        self,
        context: zmq.Context[Any],
        config: EngineConfig,
        topics: tuple[bytes, ...] = (),
        keypair: Keypair | None = None,
    ) -> None:
        """`keypair` None: that of this user."""
        self.config = config
        self._keypair = keypair or own_keypair("client", make_keypair)
        self.control = self._connect(context, zmq.DEALER, "control")
        self.bulk = self._connect(context, zmq.DEALER, "bulk")
        self.state = self._connect(context, zmq.SUB, "state")
        for topic in topics:
            self.state.subscribe(topic)
        self._codecs = {self.control: frames.Codec(FromGateway), self.bulk: frames.Codec(FromBulk)}

    @staticmethod
    def _connect(context: zmq.Context[Any], kind: int, name: str) -> Any:
        socket = context.socket(kind)
        socket.linger = 0
        return socket

    def open(self) -> Client:
        """Connect all."""
        for socket, name in ((self.control, "control"), (self.bulk, "bulk"), (self.state, "state")):
            be_client(socket, self._keypair, public_key(Path(self.config.run_dir)))
            socket.connect(self.config.endpoint(name))
        return self

    def hello(self, user: str = "eve", *, read_only: bool = False) -> Any:
        """Shake hands and return the answer."""
        return self.ask(Hello(proto_min=1, proto_max=frames.PROTOCOL, client="test", user=user, read_only=read_only))

    def say(self, message: msgspec.Struct, head: frames.Header | None = None, socket: Any = None) -> None:
        """Send one message."""
        head = head or frames.header(self.config.id, self.config.epoch)
        (socket or self.control).send_multipart([frames.encode(head), frames.encode(message)])

    def hear(self, socket: Any = None, timeout: float = 60.0) -> Any:
        """Return the next answer."""
        socket = socket or self.control
        assert socket.poll(int(timeout * 1e3)), "no answer"
        head, body = frames.split(socket.recv_multipart())
        assert frames.decode_header(head).epoch == self.config.epoch
        return self._codecs[socket].decode(body)

    def ask(self, message: msgspec.Struct, **more: Any) -> Any:
        """Send and return the next answer."""
        self.say(message, **more)
        return self.hear(more.get("socket"))

    def command(self, verb: Any, identity: str, **changes: Any) -> Command:
        """Return a command that is good now."""
        return Command(**({"id": identity, "epoch": self.config.epoch, "verb": verb, "by": "eve"} | changes))

    def published(self, timeout: float = 60.0) -> tuple[bytes, frames.Header, bytes]:
        """Return the next message of `state`."""
        assert self.state.poll(int(timeout * 1e3)), "nothing is published"
        topic, head, body = self.state.recv_multipart()
        return topic, frames.decode_header(head), body

    def snapshot(self, timeout: float = 60.0) -> Snapshot:
        """Return the newest snapshot, waiting for one."""
        while True:
            topic, _, body = self.published(timeout)
            if topic.startswith(frames.TOPIC_SNAPSHOT):
                return frames.decode_as(Snapshot, body)

    def close(self) -> None:
        """Close all."""
        for socket in (self.control, self.bulk, self.state):
            socket.close()
