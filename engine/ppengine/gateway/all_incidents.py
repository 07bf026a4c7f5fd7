"""All incidents of the engine: of the pipeline, and those with which steps go on: of processes, stores and disks.

Both may last at once, and neither hides the other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from ppengine.gateway.fault_record import RESUME_S
from ppengine.gateway.history import History
from ppengine.gateway.incident_log import IncidentLog, Numbers
from ppengine.protocol.facts import Serving
from ppengine.protocol.inspection import FaultDetail
from ppengine.protocol.snapshot import BESIDE_STEPS, Cause, Event, IncidentInfo, Verdict, is_beside


class BesideRecord:
    """The record of a fault with which steps go on: of the process or backend that its first verdict names.

    It keeps that verdict. Later ones may be on others as well, or on others alone: then theirs is the next record.
    """

    def __init__(self, cause: Cause, fault: FaultDetail | None) -> None:
        """`fault`: the newest one of a gateway before this one; its verdict comes again if it lasts."""
        self._cause, self.kept = cause, fault
        self._begun = self._unseen_until = time.monotonic()
        """Monotonic time of the begin of `kept`, and that until which it may be without its verdict."""
        if fault is not None and fault.over_wall is None:
            self._begun -= max(0.0, time.time() - fault.wall)
            self._unseen_until += RESUME_S
        self.others: list[Verdict] = []
        """Further faults of the cause, while that of `kept` lasts."""

    def look(self, verdicts: Sequence[Verdict]) -> None:
        """Begin, follow or end the record."""
        mine = [one for one in verdicts if one.root and one.cause == self._cause and is_beside(one.cause, one.stage)]
        kept, now = self.kept, time.monotonic()
        named = [(one.subject, one.summary) for one in mine]
        named += [(one.subject, one.summary) for verdict in mine for one in verdict.further]
        self.others = []
        if kept is not None and kept.over_wall is None:
            own = kept.verdict.subject
            if any(subject == own for subject, _ in named):
                others = [one for one in named if one[0] != own]
                self.others = [
                    replace(kept.verdict, subject=subject, summary=summary, further=[], root=False)
                    for subject, summary in others
                ]  # fmt: skip
                return
            if now < self._unseen_until:
                return
            # The wall clock may have been set since the begin.
            kept.over_wall = kept.wall + now - self._begun
        if mine:
            number, self._begun = 1 if kept is None else kept.number + 1, now
            self.kept = FaultDetail(
                number=number, wall=time.time(), verdict=mine[0], waits=[], retired=[], missing=["no step waits for it"]
            )  # fmt: skip


class Incidents:
    """Follows the pipeline's record, which another part makes, and has one for each cause beside it."""

    def __init__(self, folder: Path, history: History) -> None:
        """`folder`: of the engine's kept files; incidents of a gateway before this one are counted on."""
        numbers = Numbers(folder)
        self._pipeline = IncidentLog(folder, history, numbers)
        beside = {cause: IncidentLog(folder, history, numbers, cause) for cause in BESIDE_STEPS}
        self._beside = [(BesideRecord(cause, log.resumed), log) for cause, log in beside.items()]
        self._logs = [self._pipeline, *beside.values()]

    @property
    def resumed(self) -> FaultDetail | None:
        """The fault of the pipeline's newest incident of a gateway before this one."""
        return self._pipeline.resumed

    @property
    def newest(self) -> IncidentInfo | None:
        """The newest incident that lasts, otherwise the newest one."""
        known = [log.newest for log in self._logs if log.newest is not None]
        return max(known, key=lambda one: (one.over_wall is None and not one.ended, one.number), default=None)

    def note_event(self, event: Event) -> None:
        """Keep an event that may belong to an incident."""
        for log in self._logs:
            log.note_event(event)

    def look(self, fault: FaultDetail | None, verdicts: Sequence[Verdict], served: Serving | None = None) -> None:
        """Begin, follow and end incidents; `fault` and `served` are those of the pipeline."""
        self._pipeline.look(fault, verdicts, served)
        for record, log in self._beside:
            record.look(verdicts)
            log.look(record.kept, record.others)

    def close(self) -> None:
        """Write the incidents that are open: the engine ends."""
        for log in self._logs:
            log.close()
