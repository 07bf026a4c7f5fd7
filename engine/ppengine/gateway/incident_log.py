"""The list of faults that lasts: one folder an incident, written when it begins and again when it has ended."""

from __future__ import annotations

import contextlib
import logging
import shutil
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from ppengine.gateway.history import History
from ppengine.protocol.facts import Serving
from ppengine.protocol.incidents import FILE, Incident, incident_folders, newest_incident
from ppengine.protocol.inspection import FaultDetail
from ppengine.protocol.kept_files import write_file
from ppengine.protocol.severity import is_routine
from ppengine.protocol.snapshot import Cause, Event, IncidentInfo, Verdict

AROUND_S = 60.0
"""Seconds before and after an incident that are kept with it."""
KEPT = 100
_EVENTS_MOST = 200
AGAIN_S = 10.0
"""Seconds after a slowness in which the same verdict is the same incident, if nothing has healed it.

Beside the pipeline it is `AROUND_S`: a store may fail again and again, and must not push out other incidents.
"""
_BEFORE_S = 2.0
"""Seconds before a verdict in which an event may belong to its fault: some ends are reported before they are judged."""
_ENDINGS = ("stage.continued", "stage.back")
"""Events that say how a fault ended."""
_ACTED = ("op.accepted", "op.applied")
"""Events of commands that had an effect."""
_CUT = "the engine ended before it was over"
_UNEXPLAINED = "it ended without a command or a restart"
_GONE = "nothing shows it any more"
"""How a fault beside the pipeline ended: no fact or event says so."""
log = logging.getLogger("ppengine.gateway")


class _Settling(NamedTuple):
    """An incident that has ended, until the time after it is recorded."""

    due: float
    """Monotonic time at which that is so."""
    incident: Incident
    begun_ns: int
    """Monotonic time at which it began."""


class Numbers:
    """Numbers of the incidents of one engine, in order."""

    def __init__(self, folder: Path) -> None:
        before = incident_folders(folder)
        self._newest = int(before[-1].name) if before else 0

    def take(self) -> int:
        """Return the next one."""
        self._newest += 1
        return self._newest


class IncidentLog:
    """Follows the record of the present fault. A disk that is full costs the list, never the engine."""

    def __init__(self, folder: Path, history: History, numbers: Numbers, beside: Cause | None = None) -> None:
        """`folder`: of the engine's kept files; incidents of a gateway before this one are counted on.

        `beside`: the cause of all its faults, with which steps go on; None: they are the pipeline's.
        """
        self._folder, self._history, self._numbers, self._beside = folder, history, numbers, beside
        self._unexplained = _UNEXPLAINED if beside is None else _GONE
        self._recent: deque[Event] = deque(maxlen=_EVENTS_MOST)
        self._open: Incident | None = None
        self._begun_ns = 0
        """Monotonic time at which the open incident began."""
        self._served: Serving | None = None
        self._fault: FaultDetail | None = None
        self._consequences: dict[object, str] = {}
        """Those of the newest incident, by process."""
        self._settling: list[_Settling] = []
        self.newest: IncidentInfo | None = None
        self._resume(newest_incident(folder, beside))

    @property
    def resumed(self) -> FaultDetail | None:
        """The fault of the newest incident of a gateway before this one."""
        return self._fault

    def _resume(self, incident: Incident | None) -> None:
        """Go on with the newest incident of a gateway before this one."""
        if incident is None:
            return
        info = incident.info
        self._begun_ns = time.monotonic_ns() - int(max(0.0, time.time() - info.wall) * 1e9)
        self.newest, self._fault = info, incident.fault
        self._consequences = {-number: text for number, text in enumerate(incident.consequences, 1)}
        if info.over_wall is not None:
            if time.time() - info.over_wall < AROUND_S:
                self._settle_later(incident)
            return
        info.ended, self._open = "", incident

    def note_event(self, event: Event) -> None:
        """Keep an event that may belong to an incident; ends of requests would leave no room for the others."""
        if is_routine(event):
            return
        if self._open is not None:
            if len(self._open.events) < _EVENTS_MOST:
                self._open.events.append(event)
        else:
            self._recent.append(event)

    def look(self, fault: FaultDetail | None, verdicts: Sequence[Verdict], served: Serving | None = None) -> None:
        """Begin, follow or end the incident of `fault`, the newest record of the fault recorder.

        `served`: the newest fact that the engine serves again.
        """
        now, self._served = time.time(), served
        if fault is not None and fault is not self._fault:
            self._end(now)
            if not self._again(fault):
                self._begin(fault)
        if self._open is not None and fault is not None:
            self._note_consequences(verdicts)
            over = fault.over_wall
            if over is not None:
                self._end(over)
        for one in [one for one in self._settling if time.monotonic() >= one.due]:
            self._settling.remove(one)
            self._settle(one.incident)

    def close(self) -> None:
        """Write the incidents that are open: the engine ends."""
        self._end(None)
        for _, incident, _ in self._settling:
            if incident.info.ended == self._unexplained and time.time() - (incident.info.over_wall or 0.0) < _BEFORE_S:
                incident.info.over_wall, incident.info.ended = None, _CUT  # The end of the engine cleared its verdict.
            self._settle(incident)

    def _begin(self, fault: FaultDetail) -> None:
        self._fault = fault
        verdict = fault.verdict
        self._begun_ns = time.monotonic_ns() - int((time.time() - fault.wall + verdict.since_s) * 1e9)
        info = IncidentInfo(
            number=self._numbers.take(), wall=fault.wall - verdict.since_s, stage=verdict.stage, rank=verdict.rank,
            cause=verdict.cause, summary=verdict.summary,
        )  # fmt: skip
        self._consequences = {}
        events = [event for event in self._recent if event.wall >= info.wall - _BEFORE_S]
        self._open, self.newest = Incident(info=info, fault=fault, events=events), info
        self._recent.clear()
        self._write(self._open)
        with contextlib.suppress(OSError):  # Out of descriptors, perhaps: the next incident makes room.
            for folder in incident_folders(self._folder)[:-KEPT]:
                shutil.rmtree(folder, ignore_errors=True)

    def _again(self, fault: FaultDetail) -> bool:
        """Go on with an incident before, if `fault` is it: a slowness comes and goes with the load, as one fault.

        It is the newest one of the pipeline; beside that, several may come in turn.
        """
        if self._beside is None and fault.verdict.cause != "straggler":
            return False
        recent = reversed(self._settling) if self._beside is not None else self._settling[-1:]
        known = next((one for one in recent if self._is_same(one.incident, fault)), None)
        if known is None:
            return False
        self._settling.remove(known)
        incident = known.incident
        incident.info.over_wall, incident.info.ended = None, ""
        self._open, self._begun_ns, self._fault, self.newest = incident, known.begun_ns, fault, incident.info
        return True

    def _is_same(self, incident: Incident, fault: FaultDetail) -> bool:
        """Return whether `fault` may be that of an incident which has ended."""
        info, verdict = incident.info, fault.verdict
        before, now = (info.stage, info.rank, info.cause), (verdict.stage, verdict.rank, verdict.cause)
        if before != now or info.ended != self._unexplained:
            return False
        if self._beside is not None and incident.fault.verdict.subject != verdict.subject:
            return False
        return fault.wall - (info.over_wall or 0.0) <= (AGAIN_S if self._beside is None else AROUND_S)

    def _note_consequences(self, verdicts: Sequence[Verdict]) -> None:
        """Note the newest verdict on each other process as a consequence of the open incident."""
        assert self._open is not None
        for one in verdicts:
            if not one.root:
                key = (one.stage, one.rank) if self._beside is None else one.subject
                self._consequences[key] = one.summary
        self._open.consequences = list(dict.fromkeys(self._consequences.values()))

    def _end(self, over_wall: float | None) -> None:
        """End the open incident; `over_wall` None: the engine ended during it.

        A verdict stays for some seconds after its fault is healed, so the fact or event that says so is the end.
        """
        incident, self._open = self._open, None
        if incident is None:
            return
        info, verdict = incident.info, incident.fault.verdict
        info.cause, info.summary = verdict.cause, verdict.summary
        info.stage, info.rank = verdict.stage, verdict.rank
        ending = next((event for event in reversed(incident.events) if event.kind in _ENDINGS), None)
        ending = ending if self._beside is None else None
        served = self._served if self._served is not None and self._served.mono_ns >= self._begun_ns else None
        info.by = next((event.by for event in reversed(incident.events) if _acts(event)), "")
        if over_wall is None:
            info.ended = _CUT
        elif served is not None:
            info.over_wall = info.wall + (served.mono_ns - self._begun_ns) / 1e9
            info.ended = f"all stages serve again, generation {served.generation}"
            info.by, info.recomputed = served.by or info.by, served.recomputed
        elif ending is None:
            info.over_wall, info.ended = self._end_of(info, over_wall), self._unexplained
        else:
            info.over_wall, info.ended = self._end_of(info, ending.wall), ending.text
        self._write(incident)
        self._settle_later(incident)

    def _end_of(self, info: IncidentInfo, wall: float) -> float:
        """Return the time of an end as if the wall clock had not been set since the begin."""
        lasted_s, ago_s = (time.monotonic_ns() - self._begun_ns) / 1e9, time.time() - wall
        return info.wall + lasted_s - (ago_s if 0.0 <= ago_s <= lasted_s else 0.0)

    def _settle_later(self, incident: Incident) -> None:
        """Settle an incident when the time after it is recorded. The wall clock may be set meanwhile."""
        self._settling.append(_Settling(time.monotonic() + AROUND_S, incident, self._begun_ns))

    def _settle(self, incident: Incident) -> None:
        """Write an incident for the last time, with the recordings around it."""
        self._write(incident)
        begin = incident.info.wall - AROUND_S
        end = (incident.info.over_wall or time.time()) + AROUND_S
        self._history.around(begin, end, self._path(incident))

    def _write(self, incident: Incident) -> None:
        try:
            path = self._path(incident)
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(path / FILE, msgspec.json.encode(incident))
        except OSError as error:
            log.warning("incident %d is not kept: %s", incident.info.number, error)

    def _path(self, incident: Incident) -> Path:
        return self._folder / "incidents" / str(incident.info.number)


def _acts(event: Event) -> bool:
    """Return whether an event is of an operator's command on the engine; users submit all the time."""
    return bool(event.by) and event.kind in _ACTED and not event.text.startswith("submit")
