"""Looks at the processes beside the pipeline: their kernel state, and the ages of their reports.

Children of core, HTTP processes and texts, as those for grammars, send no report to the gateway: their state counts.
So does that of the fork server, a child of the supervisor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from ppengine.common.cgroup_limits import frozen_by
from ppengine.common.procfs import cgroups, children, read_stat, tracer
from ppengine.diagnosis.budgets import HELPER_SILENT_S
from ppengine.diagnosis.helper_evidence import HelperEvidence
from ppengine.protocol.reports import ProcessInfo, Unanswered
from ppengine.protocol.stage_samples import TRACED

LOOK_NS = 500_000_000
"""Nanoseconds between two looks: each reads some files of every process, and a judgement may follow each report."""


class Sign(NamedTuple):
    """The newest report of a process: its time, and how many answers an HTTP process had open."""

    mono_ns: int
    open: int = 0


class HelperWatch:
    """Remembers since when each process is known, and since when it is stopped."""

    def __init__(self, http_roles: Iterable[str], text_roles: Iterable[str]) -> None:
        self._http_roles = list(http_roles)
        self._parents = {"core", "supervisor", *self._http_roles, *text_roles}
        self._roles = {*self._http_roles, *text_roles, "supervisor", "agent"}
        self._seen: tuple[HelperEvidence, ...] = ()
        self._seen_ns = 0
        """Time of the newest look, and its evidence."""
        self._first: dict[int, int] = {}
        """Time of the first look at each process, by pid."""
        self._from: dict[int, int] = {}
        """Time from which its silence counts: that look, the end of a stop, or the restart of the clock."""
        self._stopped: dict[int, int] = {}
        """Time of the first of an unbroken run of looks that found it stopped, by pid."""

    @property
    def http_serves(self) -> bool | None:
        """Whether an HTTP process takes calls, by the newest look; None without a port.

        Each reports once it takes connections. A stopped or silent one does not count.
        """
        if not self._http_roles:
            return None
        found = [one for one in self._seen if one.role in self._http_roles and not one.parent]
        return any(
            one.reported and one.stopped_for_s is None and one.silent_for_s < HELPER_SILENT_S for one in found
        )  # fmt: skip

    def restart_clock(self, now_ns: int) -> None:
        """Begin again: the missing reports until now are no fault of any process."""
        self._from = dict.fromkeys(self._from, now_ns)
        self._seen_ns = 0

    def look(
        self, now_ns: int, listed: Iterable[ProcessInfo], signs: Mapping[str, Sign], late: Iterable[Unanswered] = ()
    ) -> tuple[HelperEvidence, ...]:
        """Return the evidence on those of `listed` that run on this host. `signs`: the newest reports, by role.

        `late`: children that have not answered the core.
        """
        if now_ns - self._seen_ns < LOOK_NS:
            return self._seen
        here = [one for one in listed if one.pid and not one.node and one.exit_code is None]
        present = [one for one in here if one.role in self._roles]
        parents = {one.pid: one.role for one in here if one.role in self._parents}
        born = [
            (parents[parent], ProcessInfo(role=module.split(".")[-1], stage=None, rank=None, pid=pid))
            for pid, (parent, module) in children(parents).items()
            if parents[parent] != "supervisor" or module.endswith(".forkserver")  # It lists its other children.
        ]  # fmt: skip
        pids = [one.pid for one in present] + [one.pid for _, one in born]
        self._first = {pid: self._first.get(pid, now_ns) for pid in pids}
        self._from = {pid: self._from.get(pid, first) for pid, first in self._first.items()}
        self._stopped = {pid: since for pid, since in self._stopped.items() if pid in self._first}
        found = [self._look(now_ns, one, signs.get(one.role)) for one in present]
        owed = {each.pid: each.for_s for each in late}
        found += [
            replace(self._look(now_ns, one, None), parent=role, silent_for_s=0.0, owes_for_s=owed.get(one.pid))
            for role, one in born
        ]
        self._seen, self._seen_ns = tuple(found), now_ns
        return self._seen

    def _look(self, now_ns: int, one: ProcessInfo, sign: Sign | None) -> HelperEvidence:
        stat = read_stat(one.pid)
        state = stat.state if stat is not None else None
        frozen = str(frozen_by(cgroups(one.pid)) or "")
        if frozen or state in ("T", TRACED):
            self._stopped.setdefault(one.pid, now_ns)
        elif self._stopped.pop(one.pid, None) is not None:
            self._from[one.pid] = now_ns
        since = self._stopped.get(one.pid)
        newest_ns = 0 if sign is None else sign.mono_ns
        http = one.role in self._http_roles
        return HelperEvidence(
            role=one.role, pid=one.pid, process_state=state, frozen=frozen,
            tracer=tracer(one.pid) if state == TRACED else None,
            stopped_for_s=None if since is None else (now_ns - since) / 1e9,
            silent_for_s=(now_ns - max(newest_ns, self._from[one.pid])) / 1e9,
            reported=newest_ns > self._first[one.pid], open=sign.open if sign is not None else 0,
            of=len(self._http_roles) if http else 1,
        )  # fmt: skip
