"""The agent: one process a node that observes its stages from outside, also those that cannot answer.

`python -m ppengine.agent.agent --engine RUN_DIR/engine.json --lifeline FD`. It never touches
a device and never blocks: it drops and counts the reports that the gateway does not take.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import zmq

from ppengine.agent import last_steps, late_claims, nvml
from ppengine.agent.edge_watch import EdgeWatch
from ppengine.agent.far_edges import FarEdges
from ppengine.agent.host_load import HostLoad, HostRoom
from ppengine.agent.stack_dumps import Ability, self_test, take
from ppengine.agent.stage_watch import DEVICE_PAGE, StageWatch
from ppengine.common import debug_attach, lifeline, logs, procfs
from ppengine.common.config import EngineConfig
from ppengine.common.ptrace_pauses import PauseFilter, PtracePauses
from ppengine.protocol import frames
from ppengine.protocol.agent_messages import ClockAnswer, ClockQuestion, ToAgent
from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.inspection import RingsDetail, StacksDetail, StageStacks
from ppengine.protocol.place import Place
from ppengine.protocol.stage_samples import AgentReport, StageSample

log = logging.getLogger("ppengine.agent")

CALM_S, ALERT_S = 0.3, 0.1
"""Seconds between two samples. Most of the cost is waking up, so healthy stages are sampled seldom."""
CALM_MS = 400.0
"""Milliseconds in which a serving stage makes progress, also an idle one; otherwise it is sampled more often."""
_RING_NAME = re.compile(r"s(\d+)\.(\d+)\.(?:([A-Za-z0-9_-]+)\.ring|device\.page)")
_SPIES = 4
CORE = "ppengine.core"
RECONNECT_MS = 20
STACKS_FILE = "stacks.txt"
"""File in the run folder with the result of the stack self-test."""
_SETTLED_NS = 1_000_000_000


class Sampler:
    """Samples all stages of this node."""

    def __init__(self, config: EngineConfig) -> None:
        self.pauses = PtracePauses()
        self._folder = Path(config.ring_dir)
        self._watches: dict[tuple[int, int], StageWatch] = {}
        self._node, self._groups = config.node_name, config.groups
        self._edges = EdgeWatch()
        self._far_edges = None if config.cluster is None else FarEdges()
        self._host_load = HostLoad()
        self._host_room = HostRoom()
        self._found: dict[tuple[int, int], dict[str, tuple[Path, int]]] = {}
        self._scanned_ns = 0
        self.files: Mapping[tuple[int, int], last_steps.Files] = {}
        """Ring files of each stage and rank; replaced as a whole."""
        self.pids: dict[tuple[int, int], int] = {}
        """Pid of each stage and rank; replaced as a whole, so that another thread may read it."""

    def look(self) -> AgentReport:
        """Sample every stage and return the report."""
        found = self._scan()
        for key in [key for key in self._watches if key not in found]:
            self._watches.pop(key).close()
            log.info("the rings of %s are gone", self._groups.text(Place(*key)))
        self.files = found
        for key in found:
            if key not in self._watches:
                self._watches[key] = StageWatch(*key, self._groups)
            watch = self._watches[key]
            before = watch.pid
            watch.update(found[key])
            if watch.pid not in (before, None):
                log.info("watching %s, pid %d", self._groups.text(Place(*key)), watch.pid)
        # Before the waits of stages, which a full host excuses: this process may have been stopped for seconds.
        self._host_load.look_idle()
        paused_ns = self.pauses.total_ns()
        seen = [
            (self._watches[key], self._watches[key].look(self._host_load, paused_ns)) for key in sorted(self._watches)
        ]
        self.pids = {(watch.stage, watch.rank): watch.pid for watch, _ in seen if watch.pid is not None}
        stages = [sample for _, sample in seen if sample is not None]
        late_claims.settle(stages)
        if not all(watch.by_device for watch, _ in seen):
            self._host_load.look({sample.pid: sample.cpu_s for sample in stages if sample.cpu_s is not None})
        self._edges.look(time.monotonic_ns(), stages, self._watches, paused_ns)
        available, age_ms = self._host_room.look()
        return AgentReport(
            mono_ns=time.monotonic_ns(), node=self._node, stages=stages, available=available, available_age_ms=age_ms,
            far_edges=[] if self._far_edges is None else self._far_edges.look(self._watches),
        )  # fmt: skip

    def _scan(self) -> dict[tuple[int, int], dict[str, tuple[Path, int]]]:
        """Return path and inode of every ring by stage; the folder is read only after it has changed."""
        try:
            changed_ns = self._folder.stat().st_mtime_ns
            # A folder's time is coarse: a file of the same tick as the last scan would be missed.
            if changed_ns == self._scanned_ns and time.time_ns() - changed_ns > _SETTLED_NS:
                return self._found
            entries = list(os.scandir(self._folder))
        except OSError:
            return {}
        self._scanned_ns, self._found = changed_ns, {}
        for entry in entries:
            match = _RING_NAME.fullmatch(entry.name)
            if match is not None:
                key = int(match[1]), int(match[2])
                self._found.setdefault(key, {})[match[3] or DEVICE_PAGE] = Path(entry.path), entry.inode()
        return self._found


class StackServer:
    """Answers `Inspect` of stacks and rings on a socket and thread of its own: a slow py-spy never stops the sampling.

    It answers one question after the other. A caller that wants both asks for the rings first: they take milliseconds.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], config: EngineConfig, sampler: Sampler) -> None:
        self._sampler, self._config = sampler, config
        self.pauses = sampler.pauses
        self._codec = frames.Codec(ToAgent)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, config.node_name.encode())
        self._socket.setsockopt(zmq.MAXMSGSIZE, 64 * 1024)
        # No answer waits for a gateway that is gone.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 10 * RECONNECT_MS)
        config.connect(self._socket, "agent")
        threading.Thread(target=self._serve, name="stacks", daemon=True).start()

    def _serve(self) -> None:
        ability = self_test()
        log.log(logging.INFO if ability.native else logging.WARNING, "stacks: %s", ability.text)
        # For `doctor`, which asks no engine.
        with contextlib.suppress(OSError):
            (Path(self._config.run_dir) / STACKS_FILE).write_text(ability.text + "\n")
        while True:
            body = self._socket.recv_multipart()
            try:
                question = self._codec.decode(frames.split(body, 1)[0])
            except frames.ProtocolError:
                continue
            answer: msgspec.Struct | None = None
            if isinstance(question, Inspect):
                answer = self._answer(question, ability)
            elif isinstance(question, ClockQuestion):
                answer = ClockAnswer(nonce=question.nonce, mono_ns=time.monotonic_ns())
            if answer is not None:
                with contextlib.suppress(zmq.Again):
                    self._socket.send(frames.encode(answer), zmq.NOBLOCK)

    def _answer(self, question: Inspect, ability: Ability) -> Inspected | Failed:
        if question.what not in ("stacks", "rings"):
            text = f"the agent has stacks and rings, not {question.what}"
            return Failed(nonce=question.nonce, code="UNSUPPORTED", text=text)
        stages = range(self._config.stages) if question.stage is None else [question.stage]
        if not all(0 <= stage < self._config.stages for stage in stages):
            text = f"no stage {question.stage}: this engine has 0 to {self._config.stages - 1}"
            return Failed(nonce=question.nonce, code="NOT_FOUND", text=text)
        try:
            detail = (
                self._rings(question, stages) if question.what == "rings" else self._stacks(question, stages, ability)
            )
        except (OSError, RuntimeError) as error:  # No descriptor or thread is left at present.
            return Failed(nonce=question.nonce, code="FAILED", text=f"the agent cannot look: {error}")
        return Inspected(nonce=question.nonce, what=question.what, data=msgspec.Raw(frames.encode(detail)))

    def _rings(self, question: Inspect, stages: Sequence[int]) -> RingsDetail:
        places = [place for place in self._config.groups.places if place.stage in stages]
        return last_steps.read_rings(self._sampler.files, places, question.lines)

    def _stacks(self, question: Inspect, stages: Sequence[int], ability: Ability) -> StacksDetail:
        with ThreadPoolExecutor(_SPIES) as pool:
            core = pool.submit(self._take_core) if question.core or question.stage is None else None
            places = [place for place in self._config.groups.places if place.stage in stages and not question.core]
            taken = pool.map(lambda place: self._take(place, ability), places)
            return StacksDetail(stages=list(taken), core=core.result() if core else None, ability=ability.text)

    def _take(self, place: Place, ability: Ability) -> StageStacks:
        pid = self._sampler.pids.get(place)
        file = debug_attach.stack_file(self._config.run_dir, *place)
        with self.pauses.pause(pid or 0):
            taken = take(place.stage, pid, file, ability.native)
        return msgspec.structs.replace(taken, rank=place.rank)

    def _take_core(self) -> StageStacks:
        pid = procfs.sibling(CORE)
        if pid is None:
            return StageStacks(
                stage=None, pid=None, error=f"no process of {CORE} beside the agent's (pid {os.getpid()})"
            )
        # Python frames alone, which pause it for milliseconds: all stages wait for it.
        return take(None, pid, debug_attach.stack_file(self._config.run_dir, None))


def is_calm(sample: StageSample) -> bool:
    """Return whether a stage is healthy: it loads, or it runs and makes progress."""
    if sample.process_state not in ("R", "S", "D") or sample.frozen:
        return False
    moves = max(sample.progress_age_ms or 0.0, sample.tick_age_ms or 0.0) < CALM_MS
    return moves or sample.phase != "serving"


def run(config: EngineConfig, stop: threading.Event) -> None:
    """Sample and push until `stop` is set."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.setsockopt(zmq.SNDHWM, 4)
    push.setsockopt(zmq.LINGER, 0)
    config.connect(push, "collect")
    sampler = Sampler(config)
    gpus = nvml.start()
    stacks = StackServer(context, config, sampler)
    pause_filter = PauseFilter(stacks.pauses)
    dropped, due = 0, time.monotonic()
    while not stop.is_set():
        begun_ns = time.monotonic_ns()
        report = sampler.look()
        report.stages = [pause_filter.apply(sample, begun_ns) for sample in report.stages]
        report.dropped = dropped
        report.held_ns = stacks.pauses.total_ns()
        report.gpus = gpus.latest() if gpus is not None else []
        try:
            push.send(frames.encode(report), zmq.NOBLOCK)
        except zmq.Again:
            dropped += 1
        # After a pause (a stop, a slow /proc) the period restarts: no burst.
        due = max(due + (CALM_S if all(map(is_calm, report.stages)) else ALERT_S), time.monotonic())
        stop.wait(due - time.monotonic())


def main() -> None:
    """Run until the parent is gone or SIGTERM."""
    parser = argparse.ArgumentParser(prog="ppengine.agent", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, required=True, help="engine.json in the engine's run folder")
    lifeline.add_argument(parser)
    args = parser.parse_args()
    lifeline.adopt(args.lifeline)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    # Ctrl-C in a terminal is for the supervisor, which ends this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logs.start()
    config = EngineConfig.load(args.engine)
    log.info("agent of %s (%s) started on %s", config.name, config.id, config.node_name)
    run(config, stop)
    log.info("leaving on SIGTERM")
    # The stack server may wait in its socket; nothing here needs tidying.
    os._exit(0)
