"""The processes of the engine, from the supervisor's reports: pids and start times."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from ppengine.common import procfs
from ppengine.common.child_process import is_unclean
from ppengine.common.config import EngineConfig
from ppengine.diagnosis.evidence import Key
from ppengine.diagnosis.process_history import Sighting
from ppengine.diagnosis.tracker import newest_process
from ppengine.protocol.discovery import process_start
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessInfo, ProcessReport


class ProcessTable:
    """The newest report of the supervisor. `sightings` show which stages run on this host."""

    def __init__(self, config: EngineConfig, sightings: Mapping[Key, Sighting]) -> None:
        self._config, self._sightings = config, sightings
        self._starts: dict[int, int] = {}
        self.report: ProcessReport | None = None
        self._silent_head = "", 0.0
        self._core: ProcessInfo | None = None
        self.gone_core: ProcessInfo | None = None
        """The core that ended uncleanly and has no successor at work; None: there is none."""

    @property
    def listed(self) -> list[ProcessInfo]:
        """The processes of the newest report; none before the first."""
        return self.report.processes if self.report else []

    def take(self, report: ProcessReport) -> None:
        """Enter a report."""
        self.report = report
        core, before = self.core(), self._core
        if core is not None and is_unclean(core.exit_code) and core != before:
            self.gone_core = core
        elif core is not None and before is not None and core.pid != before.pid and self.gone_core is None:
            self.gone_core = before  # Its successor was there before this gateway had a report of its end.
        self._core = core
        ray = newest_process(report.processes, "ray")
        words = ray.detail if ray is not None and ray.exit_code is None else ""
        if words != self._silent_head[0]:
            self._silent_head = words, time.monotonic()
        for process in report.processes:
            if process.exit_code is not None:
                self._starts.pop(process.pid, None)
            elif (
                not process.node
                and process.pid not in self._starts
                and (start := process_start(process.pid)) is not None
            ):
                self._starts[process.pid] = start

    @property
    def silent_head(self) -> tuple[str, float] | None:
        """Words about the head of Ray's cluster if it is silent, and for how many seconds; None: it answers."""
        words, since = self._silent_head
        return (words, time.monotonic() - since) if words else None

    def others(self) -> dict[int, int]:
        """Return pid and start time of every process of this engine on this host except the gateway and its parent."""
        mine = (os.getpid(), os.getppid())
        return {
            process.pid: self._starts[process.pid]
            for process in self.listed
            if process.pid in self._starts and process.pid not in mine and self._is_here(process)
        }

    def ranks(self, stage: int) -> dict[Place, tuple[int, int]]:
        """Return (pid, start time) of the ranks of a stage that run on this host."""
        places = [place for place in self._config.groups.places if place.stage == stage]
        pids = {place: self.pid_of("stage", *place) for place in places}
        return {place: (pid, self._starts[pid]) for place, pid in pids.items() if pid is not None}

    def pid_of(self, role: str, stage: int | None = None, rank: int = 0) -> int | None:
        """Return the process of a role (and place) that runs on this host; None if none is known."""
        process = newest_process(self.listed, role, None if stage is None else (stage, rank))
        return process.pid if process and process.pid in self._starts and self._is_here(process) else None

    def core(self) -> ProcessInfo | None:
        """Return the core's process; None if it is not known."""
        return newest_process(self.listed, "core")

    def core_end(self) -> str:
        """Return how the core's process ended, empty while it runs or is not known."""
        process = self.core()
        if process is None or process.exit_code is None:
            return ""
        return f"the engine core has ended: {process.detail or f'exit code {process.exit_code}'}"

    @property
    def core_away(self) -> str:
        """How the core ended that is being restarted; empty if none is."""
        gone = self.gone_core
        how = "" if gone is None else gone.detail or f"exit code {gone.exit_code}"
        return "" if gone is None else f"the engine core (pid {gone.pid}) ended, {how}, and is restarted"

    def texts_away(self) -> str:
        """Return how the process of texts ended that is being restarted; empty if it runs or is not known."""
        process = newest_process(self.listed, "texts")
        if process is None or process.exit_code is None:
            return ""
        how = process.detail or f"exit code {process.exit_code}"
        return f"the process of texts (pid {process.pid}) ended, {how}, and is restarted"

    def is_own(self, pid: int) -> bool:
        """Return whether `pid` is a process of this engine, or the child of one, as the shadow is of the core."""
        pids = {each.pid for each in self.listed if not each.node}
        pids |= {seen.sample.pid for seen in self._sightings.values() if seen.here}
        return pid in pids or procfs.parent(pid) in pids

    def supervisor_pid(self) -> int | None:
        """Return the pid of the supervisor, which is this process's parent; None if it is not known as that."""
        process = newest_process(self.listed, "supervisor")
        return process.pid if process is not None and process.pid == os.getppid() else None

    def _is_here(self, process: ProcessInfo) -> bool:
        """Return whether a process runs on this host: a pid of another host is another process here."""
        if process.node:
            return False
        if process.role != "stage" or self._config.profile.parallel.executor == "local":
            return True
        seen = self._sightings.get((process.stage or 0, process.rank or 0))
        return seen is not None and seen.here and seen.sample.pid == process.pid
