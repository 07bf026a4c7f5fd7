"""The newest of every report, and the results of their changes: sightings, stage events, verdicts."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from ppengine.common.cgroup_limits import frozen_by
from ppengine.common.config import EngineConfig
from ppengine.common.procfs import cgroups, read_stat, tracer
from ppengine.common.ptrace_pauses import PauseHistory
from ppengine.diagnosis import diagnose, failure, waits
from ppengine.diagnosis.budgets import STOPPED_AFTER_S, shares_gil
from ppengine.diagnosis.device_evidence import with_xids
from ppengine.diagnosis.evidence import Evidence, Key, Stack
from ppengine.diagnosis.fault_log import FaultLog
from ppengine.diagnosis.helper_evidence import HelperEvidence
from ppengine.diagnosis.neighbours import with_neighbours
from ppengine.diagnosis.phrases import duration, seconds
from ppengine.diagnosis.process_history import Sighting
from ppengine.diagnosis.tier_evidence import TierEvidence
from ppengine.diagnosis.tier_history import TierHistory, is_store
from ppengine.diagnosis.tracker import EvidenceTracker
from ppengine.gateway.device_rooms import Timed, device_rooms
from ppengine.gateway.event_log import EventLog
from ppengine.gateway.far_links import FarLinks
from ppengine.gateway.glance import AGENT_SILENT_S, glanced, silent_agent
from ppengine.gateway.helper_watch import HelperWatch, Sign
from ppengine.gateway.http_clients import HttpClients
from ppengine.gateway.merge import Inputs, held_bytes, merge
from ppengine.gateway.node_clocks import NodeClocks
from ppengine.gateway.process_ends import end_event
from ppengine.gateway.process_table import ProcessTable
from ppengine.gateway.shortage_watch import ShortageWatch
from ppengine.gateway.stage_changes import StageChanges
from ppengine.protocol.clients import HttpReport
from ppengine.protocol.facts import Exited, Fact, Serving
from ppengine.protocol.gpu import DeviceRooms, GpuInfo
from ppengine.protocol.reports import CoreReport, Finding, Happened, ProcessReport
from ppengine.protocol.snapshot import IncidentInfo, LeaseInfo, Snapshot, Verdict, WaitInfo
from ppengine.protocol.stage_samples import TRACED, AgentReport

CORE_SILENT_S = 2.0
_ORDERLY = frozenset({0, -15, -2})
"""Exit codes of a core that ended on request."""


class Collector:
    """Takes reports and returns snapshots. Call `judge` with every report of an agent, and by the clock without one."""

    def __init__(self, config: EngineConfig, events: EventLog) -> None:
        self._config, self._events = config, events
        self._tracker = EvidenceTracker(config.stages, config.profile.console.publish_hz, config.groups.tensor)
        self._faults = FaultLog(since_ns=time.monotonic_ns())
        self.node = config.node_name
        """Name of the engine's own node."""
        self._sightings: dict[Key, Sighting] = {}
        self.clocks = NodeClocks()
        self._far_links = FarLinks(self.node, self.clocks, self._sightings)
        self._agent_ns: dict[str, int] = {}
        self._agent_dropped: dict[str, int] = {}
        self._gpus: dict[str, tuple[GpuInfo, int]] = {}
        """Figures by UUID, and the time of the agent's report."""
        self._hosts: dict[str, Timed] = {}
        """Available memory by host."""
        self._stage_changes = StageChanges(config.groups, events)
        self._evidence: Evidence | None = None
        self.verdicts: list[Verdict] = []
        self._failed_at = 0.0
        """Time of the diagnosis's failure, while it fails."""
        self.processes = ProcessTable(config, self._sightings)
        self._clients = HttpClients()
        self._shortages = ShortageWatch(config)
        self._helpers = HelperWatch(config.http_roles, config.text_roles)
        self._texts_ns: int | None = None
        """Time of the newest sign of life of the process of texts."""
        self._tiers = TierHistory(config.groups.tensor)
        self.core: CoreReport | None = None
        self.news = False
        """Whether a report of an agent, or a fact, has come since the last judgement."""

    @property
    def served(self) -> Serving | None:
        """The newest fact that the engine serves again after a fault or a restart."""
        return self._faults.served

    # --- reports --------------------------------------------------------------------------------------------

    def take(self, report: object) -> None:
        """Take one message of `collect`."""
        if isinstance(report, CoreReport):
            self.core = report
        elif isinstance(report, AgentReport):
            self._take_agent(report)
        elif isinstance(report, ProcessReport):
            self.processes.take(report)
        elif isinstance(report, HttpReport):
            self._clients.take(report)
        elif isinstance(report, Happened):
            self._events.take(report)
        elif isinstance(report, Fact):
            self.news = True
            self._faults.take(report)
            if isinstance(report, Exited):
                self._note_exit(report)

    def _note_exit(self, exited: Exited) -> None:
        """Make an event of the end of a process, once: its fact comes again to each new gateway."""
        end = end_event(self._config, exited)
        if end is not None and not self._events.has(end.kind, end.text):
            self._events.say(end.kind, end.text, stage=end.stage)

    def _take_agent(self, report: AgentReport) -> None:
        # Another host has another monotonic clock: for its reports the time of arrival counts.
        here = report.node == self.node
        seen_ns = report.mono_ns if here else time.monotonic_ns()
        self._agent_ns[report.node] = seen_ns
        self._agent_dropped[report.node] = report.dropped
        self._tracker.pauses.setdefault(report.node, PauseHistory()).note(seen_ns, report.held_ns)
        self.news = True
        self._gpus.update({gpu.uuid: (gpu, seen_ns) for gpu in report.gpus})
        self._hosts[report.node] = report.available, seen_ns - int(report.available_age_ms * 1e6)
        for sample in report.stages:
            self._sightings[sample.index, sample.rank] = Sighting(sample, seen_ns, here, node=report.node)
        self._far_links.take(report, seen_ns)

    # --- answers --------------------------------------------------------------------------------------------

    def core_missing(self) -> str:
        """Return why the core cannot take a command, empty if it can."""
        if ended := self.processes.core_end():
            return ended
        if self.core is None:
            return "" if self.processes.core() is not None else "the engine core has not started yet"
        age = (time.monotonic_ns() - self.core.mono_ns) / 1e9
        limit = max(CORE_SILENT_S, 3.0 / self._config.profile.console.publish_hz)
        return f"the engine core has not reported for {age:.1f} s" if age > limit else ""

    def agent_missing(self) -> str:
        """Return why the agent cannot take a question, empty if it can."""
        newest = self._agent_ns.get(self.node)
        if newest is None:
            return "the agent has not reported yet"
        age = (time.monotonic_ns() - newest) / 1e9
        return f"the agent has not reported for {age:.1f} s" if age > AGENT_SILENT_S else ""

    def node_of(self, stage: int) -> str:
        """Return the node of a stage; the engine's own as long as no agent has seen the stage."""
        seen = self._sightings.get((stage, 0))
        return self.node if seen is None else seen.node

    def nodes(self) -> list[str]:
        """Return the nodes whose agents report."""
        late_ns = time.monotonic_ns() - int(AGENT_SILENT_S * 1e9)
        return [node for node, at_ns in self._agent_ns.items() if at_ns > late_ns]

    def core_age_ms(self) -> float | None:
        """Return the age of the core's report; None before the first."""
        return None if self.core is None else round((time.monotonic_ns() - self.core.mono_ns) / 1e6, 2)

    def step(self) -> int:
        """Return the core's step counter; 0 before its first report."""
        return self.core.engine.step if self.core else 0

    def findings(self) -> list[Finding]:
        """Return the findings of the live checks."""
        return self.core.findings if self.core else []

    def rooms(self) -> DeviceRooms:
        """Return the free memory of the stages' devices."""
        stages = self.core.stages if self.core else []
        now_ns, own = time.monotonic_ns(), self.processes.is_own
        return device_rooms(now_ns, stages, self._gpus, self._cards(), self._hosts, own)

    def _cards(self) -> dict[str, dict[int, int | None]]:
        """Return the stages on each card: by pid, the bytes that each holds."""
        cards: dict[str, dict[int, int | None]] = {}
        for view in self.core.stages if self.core else []:
            if view.device_uuid is not None and view.pid is not None:
                seen = self._sightings.get((view.index, view.rank))
                same = seen is not None and seen.sample.pid == view.pid
                used = held_bytes(seen.sample) if seen is not None and same else None
                cards.setdefault(view.device_uuid, {})[view.pid] = used
        return cards

    def waits(self) -> list[WaitInfo]:
        """Return the waits between processes, from the newest judgement."""
        return [] if self._evidence is None else waits(self._evidence)

    def retired(self) -> list[int | None]:
        """Return the newest step that each stage, or each rank of each stage, has acknowledged."""
        known = {(view.index, view.rank): view.retired_step for view in self.core.stages} if self.core else {}
        return [known.get(place) for place in self._config.groups.places]

    # --- judgement ------------------------------------------------------------------------------------------

    def judge(
        self, stopping: bool, stacks: Mapping[tuple[int | None, int], Stack] | None = None, by_ns: int | None = None
    ) -> bool:
        """Diagnose again, with one event for each new or cleared verdict. Return whether there was one.

        `stacks`: by stage and pid, those taken for known faults. After `by_ns` nothing is judged: this
        process was held since its turn began, and all reports look old.
        """
        self.news = False
        core_process = self.processes.core()
        core_state, core_tracer, core_frozen = None, None, ""
        if core_process is not None:
            stat = read_stat(core_process.pid)
            core_state = core_process.pid, stat.state if stat else None
            core_frozen = str(frozen_by(cgroups(core_process.pid)) or "")
            core_tracer = tracer(core_process.pid) if stat is not None and stat.state == TRACED else None
            stopping = stopping or core_process.exit_code in _ORDERLY
        if self.core is not None and self.core.engine.state == "stopped":
            stopping = True
        now_ns = time.monotonic_ns()
        if by_ns is not None and now_ns > by_ns:
            return False
        evidence = self._tracker.build(
            now_ns, self.core, glanced(self._sightings, now_ns), self.processes.report, core_state, faults=self._faults,
            core_tracer=core_tracer, core_frozen=core_frozen, stacks=stacks, stopping=stopping,
            agent=silent_agent(self.processes.listed) if self.agent_missing() else None,
            helpers=self._helper_evidence(now_ns),
        )  # fmt: skip
        # XIDs come up to a second late, when the stage may be dead already.
        gpus, cards = self._gpus, self._cards()
        stages = tuple(
            with_neighbours(now_ns, with_xids(now_ns, stage, gpus), gpus, cards, self.processes.is_own)
            for stage in evidence.stages
        )
        shortages = self._shortages.look(self.processes.listed)
        self._evidence = msgspec.structs.replace(
            evidence, stages=stages, shortages=shortages, silent_head=self.processes.silent_head,
            tiers=self._tier_evidence(now_ns),
        )  # fmt: skip
        before, self.verdicts = self.verdicts, diagnose(self._evidence)
        news = self._say_verdicts(before)
        known = self.core, self._sightings, self.processes.listed, self.verdicts
        return self._stage_changes.note(*known, stopping=stopping) or news

    def _say_verdicts(self, verdicts_before: list[Verdict]) -> bool:
        """Make events of verdicts that are new or over; return whether there was one."""
        before = {(verdict.stage, verdict.rank, verdict.cause): verdict for verdict in verdicts_before}
        after = {(verdict.stage, verdict.rank, verdict.cause): verdict for verdict in self.verdicts}
        # The root comes last: a console with two lines of events shows the newest.
        for key, verdict in sorted(after.items(), key=lambda each: each[1].root):
            if key not in before:
                self._events.say("verdict.raised", f"{verdict.cause}: {verdict.summary}", stage=verdict.stage)
        for key, verdict in before.items():
            if key not in after:
                age = seconds(verdict.since_s) if verdict.since_s < 60 else duration(verdict.since_s)
                text = f"over: {verdict.cause}, reported for {age}: {verdict.summary}"
                self._events.say("verdict.cleared", text, stage=verdict.stage)
        return before.keys() != after.keys()

    def _tier_evidence(self, now_ns: int) -> TierEvidence | None:
        """Return the evidence of stores and backends; None without KV tiers."""
        if self.core is None:
            return None
        stores = [process for process in self.processes.listed if is_store(process)]
        here = [process.pid for process in stores if not process.node and process.exit_code is None]
        states = {pid: stat.state if (stat := read_stat(pid)) is not None else None for pid in here}
        return self._tiers.look(now_ns, self.core.tiers, self.core.mono_ns, stores, states)

    def _helper_evidence(self, now_ns: int) -> tuple[HelperEvidence, ...]:
        """Return the evidence on the processes beside the pipeline."""
        signs = self._clients.signs()
        if self.node in self._agent_ns:
            signs["agent"] = Sign(self._agent_ns[self.node])
        if self._texts_ns is not None:
            signs["texts"] = Sign(self._texts_ns)
        if self.processes.report is not None:
            signs["supervisor"] = Sign(self.processes.report.mono_ns)
        late = () if self.core is None else self.core.unanswered
        return self._helpers.look(now_ns, self.processes.listed, signs, late)

    def texts_alive(self) -> None:
        """Note a sign of life of the process of texts."""
        self._texts_ns = time.monotonic_ns()

    def note_failure(self, error: Exception) -> bool:
        """Report that the diagnosis raised `error`, in place of verdicts. Return whether that is news."""
        self._evidence = None
        verdict, now = failure(error), time.monotonic()
        known = [one.summary for one in self.verdicts] == [verdict.summary]
        if not known:
            self._failed_at = now
            self._events.say("verdict.raised", f"{verdict.cause}: {verdict.summary}")
        self.verdicts = [msgspec.structs.replace(verdict, since_s=now - self._failed_at)]
        return not known

    def restart_clock(self) -> None:
        """Restart the time limits of all processes: the missing progress until now is no fault of theirs."""
        now_ns = time.monotonic_ns()
        self._tracker.restart_clock(now_ns)
        self._helpers.restart_clock(now_ns)

    def pids(self) -> dict[Key | None, int]:
        """Return the pid of each stage with evidence, and (None) of a core that is not stopped.

        Taking the core's stack stops it for a moment as well.
        """
        evidence = self._evidence
        if evidence is None:
            return {}
        pids: dict[Key | None, int] = {stage.key: stage.pid for stage in evidence.stages if stage.pid is not None}
        core = evidence.core
        if core.pid is not None and core.dead_for_s is None and (core.stopped_for_s or 0.0) < STOPPED_AFTER_S:
            pids[None] = core.pid
        return pids

    def gil_sharers(self) -> list[Key]:
        """Return the stages whose GIL is held for a part of the time."""
        return [] if self._evidence is None else [each.key for each in self._evidence.stages if shares_gil(each)]

    def snapshot(
        self,
        consoles: int,
        incident: IncidentInfo | None = None,
        lease: LeaseInfo | None = None,
        *,
        stopped: bool = False,
    ) -> Snapshot:
        """Return the snapshot of this moment. The last one (`stopped`) keeps the verdict on the core that ended it."""
        return merge(
            self._config,
            Inputs(
                mono_ns=time.monotonic_ns(),
                wall=time.time(),
                core=self.core,
                sightings=self._sightings,
                processes=self.processes.report,
                gpus=self._gpus,
                verdicts=[verdict for verdict in self.verdicts if not stopped or verdict.cause == "core"],
                waits=[] if stopped else self.waits(),
                event_seq=self._events.newest,
                consoles=consoles,
                dropped=sum(self._agent_dropped.values()),
                stopped=stopped,
                incident=incident,
                lease=lease,
                clients=self._clients.infos(time.monotonic_ns(), self.core.rules if self.core else []),
                core_away="" if stopped else self.processes.core_away,
                http_serves=self._helpers.http_serves,
            ),
        )
