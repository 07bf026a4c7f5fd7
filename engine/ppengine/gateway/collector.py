"""The newest of every report, and what follows from their change: sightings, ages, stage events, verdicts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

import msgspec

from ppengine.common.config import EngineConfig
from ppengine.common.procfs import read_stat, tracer
from ppengine.common.ptrace_pauses import PauseHistory
from ppengine.diagnosis import diagnose, tripped, waits
from ppengine.diagnosis.budgets import STOPPED_AFTER_S
from ppengine.diagnosis.device_evidence import with_xids
from ppengine.diagnosis.evidence import Evidence, Key, Stack
from ppengine.diagnosis.recent_deaths import RecentDeaths
from ppengine.diagnosis.tracker import EvidenceTracker, Sighting, newest_process
from ppengine.gateway.events import EventLog
from ppengine.gateway.merge import Inputs, merge, stage_state
from ppengine.protocol.discovery import process_start
from ppengine.protocol.gpu import GpuInfo
from ppengine.protocol.reports import (
    TRACED,
    AgentReport,
    CoreReport,
    Finding,
    Happened,
    ProcessInfo,
    ProcessReport,
    StageView,
)
from ppengine.protocol.snapshot import Snapshot, StageState, Verdict, WaitInfo

CORE_SILENT_S = 2.0
AGENT_SILENT_S = 2.0
_ORDERLY = frozenset({0, -15, -2})
"""Exit codes of a core that was told to end."""
_TOLD: frozenset[StageState] = frozenset({"loading", "stopped", "dead"})
"""Stage states whose coming and going is an event; the others change many times a second."""


class Collector:
    """Takes reports; gives snapshots. `judge` is to be called with every report of an agent, and without one too."""

    def __init__(self, config: EngineConfig, events: EventLog) -> None:
        self._config, self._events = config, events
        self._tracker = EvidenceTracker(config.stages, config.profile.console.publish_hz)
        self._deaths = RecentDeaths()
        self._node = socket.gethostname()
        self._sightings: dict[Key, Sighting] = {}
        self._agent_ns: dict[str, int] = {}
        self._agent_dropped: dict[str, int] = {}
        self._gpus: dict[str, tuple[GpuInfo, int]] = {}
        """By UUID, and when the agent said so."""
        self._states: dict[int, StageState] = {}
        self._evidence: Evidence | None = None
        self.verdicts: list[Verdict] = []
        self._tripped_at = 0.0
        self._starts: dict[int, int] = {}
        self._processes: ProcessReport | None = None
        self._ended: dict[Key, ProcessInfo] = {}
        """Stages whose end was reported since the last judgement; another process may have taken their place."""
        self._lost: dict[Key, StageView] = {}
        """What the core has said of stages that cannot go on since the last judgement; all may be well again."""
        self.core: CoreReport | None = None
        self.news = False
        """A report of an agent, or the end of a process, has come since the last judgement."""
        self.unreadable = 0
        """Messages that were none of this protocol."""

    # --- reports --------------------------------------------------------------------------------------------

    def take(self, report: object) -> None:
        """Take one message of `collect`."""
        if isinstance(report, CoreReport):
            self.core = report
            self._lost |= {(view.index, view.rank): view for view in report.stages if view.lost}
        elif isinstance(report, AgentReport):
            self._take_agent(report)
        elif isinstance(report, ProcessReport):
            self._take_processes(report)
        elif isinstance(report, Happened):
            for event in report.events:
                self._events.add(event)
                # A stage that cannot go on may be replaced before the next look at it.
                self.news |= event.kind == "stage.lost"

    def _take_agent(self, report: AgentReport) -> None:
        # Another host's monotonic clock is another clock: there the time of arrival counts.
        here = report.node == self._node
        seen_ns = report.mono_ns if here else time.monotonic_ns()
        self._agent_ns[report.node] = seen_ns
        self._agent_dropped[report.node] = report.dropped
        self._tracker.pauses.setdefault(report.node, PauseHistory()).note(seen_ns, report.held_ns)
        self.news = True
        self._gpus.update({gpu.uuid: (gpu, seen_ns) for gpu in report.gpus})
        for sample in report.stages:
            self._sightings[sample.index, sample.rank] = Sighting(sample, seen_ns, here)

    def _take_processes(self, report: ProcessReport) -> None:
        self._processes = report
        for process in report.processes:
            if process.exit_code is not None:
                newly = self._starts.pop(process.pid, None) is not None
                self.news |= newly
                if newly and process.role == "agent":
                    self._events.say("agent.ended", f"the agent has ended, {process.detail}: stages are not looked at")
                if process.stage is not None:
                    self._ended[process.stage, process.rank or 0] = process
            elif process.pid not in self._starts and (start := process_start(process.pid)) is not None:
                self._starts[process.pid] = start

    # --- answers --------------------------------------------------------------------------------------------

    def others(self) -> dict[int, int]:
        """Return pid and start time of every process of this engine on this host but the gateway and its parent."""
        mine = (os.getpid(), os.getppid())
        listed = self._processes.processes if self._processes else []
        return {
            process.pid: self._starts[process.pid]
            for process in listed
            if process.pid in self._starts and process.pid not in mine and self._is_here(process)
        }

    def stage_process(self, stage: int) -> tuple[int, int] | None:
        """Return (pid, start time) of a stage that runs on this host; None if none is known."""
        listed = self._processes.processes if self._processes else []
        process = newest_process(listed, "stage", (stage, 0))
        if process is None or process.pid not in self._starts or not self._is_here(process):
            return None
        return process.pid, self._starts[process.pid]

    def pid_of(self, role: str, stage: int | None = None) -> int | None:
        """Return the process of a role (and stage) that runs on this host; None if none is known."""
        listed = self._processes.processes if self._processes else []
        process = newest_process(listed, role, None if stage is None else (stage, 0))
        return process.pid if process and process.pid in self._starts and self._is_here(process) else None

    def _is_here(self, process: ProcessInfo) -> bool:
        """Return whether a process is one of this host: a pid of another host is somebody else's here."""
        if process.role != "stage" or self._config.profile.parallel.executor == "local":
            return True
        seen = self._sightings.get((process.stage or 0, process.rank or 0))
        return seen is not None and seen.here and seen.sample.pid == process.pid

    def core_missing(self) -> str:
        """Return why the core cannot take a command, empty if it can."""
        process = self._core_process()
        if ended := self.core_process_ended():
            return ended
        if self.core is None:
            return "" if process is not None else "the engine core has not started yet"
        age = (time.monotonic_ns() - self.core.mono_ns) / 1e9
        limit = max(CORE_SILENT_S, 3.0 / self._config.profile.console.publish_hz)
        return f"the engine core has not reported for {age:.1f} s" if age > limit else ""

    def core_process_ended(self) -> str:
        """Return how the core's process ended, empty while it runs or is not known."""
        process = self._core_process()
        if process is None or process.exit_code is None:
            return ""
        return f"the engine core has ended: {process.detail or f'exit code {process.exit_code}'}"

    def supervisor_pid(self) -> int | None:
        """Return the supervisor's pid."""
        process = newest_process(self._processes.processes if self._processes else [], "supervisor")
        return None if process is None else process.pid

    def agent_missing(self) -> str:
        """Return why the agent cannot take a question, empty if it can."""
        newest = max(self._agent_ns.values(), default=None)
        if newest is None:
            return "the agent has not reported yet"
        age = (time.monotonic_ns() - newest) / 1e9
        return f"the agent has not reported for {age:.1f} s" if age > AGENT_SILENT_S else ""

    def core_age_ms(self) -> float | None:
        """Return the age of the core's report."""
        return None if self.core is None else round((time.monotonic_ns() - self.core.mono_ns) / 1e6, 2)

    def step(self) -> int:
        """Return the core's step counter; 0 before its first report."""
        return self.core.engine.step if self.core else 0

    def _core_process(self) -> ProcessInfo | None:
        return newest_process(self._processes.processes if self._processes else [], "core")

    def findings(self) -> list[Finding]:
        """Return what the live checks have found."""
        return self.core.findings if self.core else []

    def waits(self) -> list[WaitInfo]:
        """Return who waits for whom, by the newest judgement."""
        return [] if self._evidence is None else waits(self._evidence)

    def retired(self) -> list[int | None]:
        """Return the newest step that each stage has acknowledged."""
        known = {view.index: view.retired_step for view in self.core.stages} if self.core else {}
        return [known.get(stage) for stage in range(self._config.stages)]

    # --- judgement ------------------------------------------------------------------------------------------

    def judge(self, stopping: bool, stacks: Mapping[int, Stack] | None = None) -> bool:
        """Diagnose anew, and make events of what came and went: one each. Return whether anything did.

        `stacks`: those taken for faults that are known, by pid.
        """
        self.news = False
        core_process = self._core_process()
        core_state = core_tracer = None
        if core_process is not None:
            stat = read_stat(core_process.pid)
            core_state = core_process.pid, stat.state if stat else None
            core_tracer = tracer(core_process.pid) if stat is not None and stat.state == TRACED else None
            stopping = stopping or core_process.exit_code in _ORDERLY
        if self.core is not None and self.core.engine.state == "stopped":
            stopping = True
        now_ns, processes = time.monotonic_ns(), self._with_the_ended()
        evidence = self._tracker.build(
            now_ns, self._with_the_lost(), self._sightings, processes, core_state,
            core_tracer=core_tracer, stacks=stacks, stopping=stopping,
        )  # fmt: skip
        samples = {key: seen.sample for key, seen in self._sightings.items()}
        listed = processes.processes if processes else []
        stages = self._deaths.keep(now_ns, evidence.stages, samples, listed, evidence.findings)
        # What the driver says of a card comes up to a second late, when the stage may be dead already.
        stages = tuple(with_xids(now_ns, stage, self._gpus) for stage in stages)
        self._evidence = msgspec.structs.replace(evidence, stages=stages)
        before = {(verdict.stage, verdict.cause): verdict for verdict in self.verdicts}
        self.verdicts = diagnose(self._evidence)
        after = {(verdict.stage, verdict.cause): verdict for verdict in self.verdicts}
        for key, verdict in after.items():
            if key not in before:
                self._events.say("verdict.raised", f"{verdict.cause}: {verdict.summary}", stage=verdict.stage)
        for key, verdict in before.items():
            if key not in after:
                text = f"{verdict.cause} after {verdict.since_s:.1f}s: {verdict.summary}"
                self._events.say("verdict.cleared", text, stage=verdict.stage)
        return self._tell_stages() or before.keys() != after.keys()

    def tripped(self, error: Exception) -> bool:
        """Tell that nobody could be judged, by `error`, in place of verdicts. Return whether that is news."""
        self._evidence = None
        verdict, now = tripped(error), time.monotonic()
        known = [one.summary for one in self.verdicts] == [verdict.summary]
        if not known:
            self._tripped_at = now
            self._events.say("verdict.raised", f"{verdict.cause}: {verdict.summary}")
        self.verdicts = [msgspec.structs.replace(verdict, since_s=now - self._tripped_at)]
        return not known

    def begin_anew(self) -> None:
        """Do not hold against anybody what was not done until now."""
        self._tracker.restart_clock(time.monotonic_ns())

    def pids(self) -> dict[int | None, int]:
        """Return the process of each stage, as far as it was looked at, and (None) of a core that nobody has stopped.

        Who looks at its stack stops it for a moment as well.
        """
        evidence = self._evidence
        if evidence is None:
            return {}
        pids: dict[int | None, int] = {stage.stage: stage.pid for stage in evidence.stages if stage.pid is not None}
        core = evidence.core
        if core.pid is not None and core.dead_for_s is None and (core.stopped_for_s or 0.0) < STOPPED_AFTER_S:
            pids[None] = core.pid
        return pids

    def _with_the_ended(self) -> ProcessReport | None:
        """Return the newest report with every end in it, so that each death is judged once, however soon made good."""
        ended, self._ended = self._ended, {}
        if self._processes is None or not ended:
            return self._processes
        others = [p for p in self._processes.processes if p.stage is None or (p.stage, p.rank or 0) not in ended]
        return ProcessReport(mono_ns=self._processes.mono_ns, processes=[*others, *ended.values()])

    def _with_the_lost(self) -> CoreReport | None:
        """Return the newest report with every loss in it, so that each is judged once, however soon made good."""
        lost, self._lost = self._lost, {}
        if self.core is None or not lost:
            return self.core
        views = []
        for view in self.core.stages:
            before = lost.get((view.index, view.rank), view)
            words = {"lost": before.lost, "lost_generation": before.lost_generation}
            views.append(view if view.lost else msgspec.structs.replace(view, **words))
        return msgspec.structs.replace(self.core, stages=views)

    def _tell_stages(self) -> bool:
        told = False
        listed = self._processes.processes if self._processes else []
        views = {(view.index, view.rank): view for view in self.core.stages} if self.core else {}
        for stage in range(self._config.stages):
            key = stage, 0
            seen, process = self._sightings.get(key), newest_process(listed, "stage", key)
            state = stage_state(views.get(key), seen.sample if seen else None, process, self.verdicts, stage)
            before = self._states.get(stage, "loading")
            self._states[stage] = state
            if before == state or not {before, state} & _TOLD:
                continue
            told = True
            pid = process.pid if process else seen.sample.pid if seen else None
            where = f"stage {stage}" + (f" (pid {pid})" if pid else "")
            if state in _TOLD:
                detail = f": {process.detail}" if process and process.detail else ""
                self._events.say(f"stage.{state}", f"{where} is {state}{detail}", stage=stage)
            elif before != "loading":  # That a stage is ready, the core says.
                word = "continued" if before == "stopped" else "back"
                self._events.say(f"stage.{word}", f"{where} is {word}, now {state}", stage=stage)
        return told

    def snapshot(self, consoles: int, *, stopped: bool = False) -> Snapshot:
        """Return the picture of this moment. The last one (`stopped`) keeps what ended the engine."""
        return merge(
            self._config,
            Inputs(
                mono_ns=time.monotonic_ns(),
                wall=time.time(),
                core=self.core,
                sightings=self._sightings,
                processes=self._processes,
                gpus=self._gpus,
                verdicts=[verdict for verdict in self.verdicts if not stopped or verdict.cause == "core"],
                waits=[] if stopped else self.waits(),
                event_seq=self._events.newest,
                consoles=consoles,
                dropped=sum(self._agent_dropped.values()),
                stopped=stopped,
            ),
        )
