"""Incidents of live and ended engines: the list, and one of them as a source."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ppengine.protocol.control import InspectWhat
from ppengine.protocol.discovery import EngineRecord, ended_engines, list_engines
from ppengine.protocol.incidents import Incident, incident_folders, read_incident, read_info
from ppengine.protocol.kept_files import engine_folder
from ppengine.protocol.snapshot import IncidentInfo

from ppconsole.link.history import History, segments
from ppconsole.link.replay import ReplaySource
from ppconsole.link.source import Detail

AROUND_S = 60.0
"""Seconds before and after an incident that its replay has."""


class IncidentError(Exception):
    """An incident that does not exist or cannot be read; the text says which ones exist."""


class Listed(NamedTuple):
    """One incident in a list. `id`: its number, or `ENGINE/NUMBER` if it is not of the engine that is meant."""

    id: str
    engine: EngineRecord
    info: IncidentInfo
    folder: Path

    def read(self) -> Incident:
        """Return all of it. Raises IncidentError."""
        try:
            return read_incident(self.folder)
        except (OSError, ValueError) as error:
            raise IncidentError(f"incident {self.id}: {self.folder} cannot be read: {error}") from None


def list_incidents(meant: EngineRecord | None, *, everything: bool = False) -> list[Listed]:
    """Return the incidents of `meant` and of earlier boots of its name, the oldest first.

    `everything`: those of all engines of this user.
    """
    records = [*(one.record for one in reversed(ended_engines())), *list_engines()]
    found = []
    for record in records:
        if not everything and meant is not None and record.name != meant.name:
            continue
        for folder in incident_folders(engine_folder(record.id)):
            with contextlib.suppress(OSError, ValueError):
                own = meant is not None and record.id == meant.id
                found.append(
                    Listed(folder.name if own else f"{record.id}/{folder.name}", record, read_info(folder), folder)
                )
    return sorted(found, key=lambda one: one.info.wall)


def choose(incidents: Sequence[Listed], wanted: str) -> Listed:
    """Return the incident that `wanted` names: NUMBER, or ENGINE/NUMBER. Raises IncidentError."""
    engine, _, number = wanted.rpartition("/")
    matching = [
        one for one in incidents
        if (one.id == wanted or (engine and one.engine.id.startswith(engine) and one.folder.name == number))
    ]  # fmt: skip
    if not matching:
        known = ", ".join(one.id for one in incidents[-10:]) or "none"
        raise IncidentError(f"no incident {wanted!r}; there are: {known}")
    return matching[-1]


def around(listed: Listed) -> list[Path]:
    """Return the recordings around an incident; those of its last minute may be in the engine's history alone."""
    history = segments([listed.folder.parent.parent / "history"])
    return [*segments([listed.folder]), *(path for path in history if is_near(listed.info, path.stem))]


def is_near(info: IncidentInfo, stem: str) -> bool:
    """Return whether the recording with this name, its begin in milliseconds, has a part of the minutes around it."""
    begin, end = info.wall - AROUND_S, (info.over_wall or info.wall + AROUND_S) + AROUND_S
    return stem.isdecimal() and begin - AROUND_S < int(stem) / 1e3 < end


class IncidentSource(ReplaySource):
    """The minutes around an incident, with its record. `at_fault`: it begins there and waits, otherwise before it."""

    kind = "incident"

    def __init__(self, listed: Listed, *, speed: float = 1.0, at_fault: bool = False) -> None:
        """Read its recordings. Raises IncidentError."""
        self.listed, self.incident = listed, listed.read()
        wall = self.incident.fault.wall
        super().__init__(
            History.of_segments(around(listed)),
            speed,
            begin=wall + 0.5 if at_fault else wall - AROUND_S,
            paused=at_fault,
        )

    @property
    def log_folder(self) -> Path | None:
        """The run folder, or the kept files of an engine that has ended; None: they are on another host."""
        if self.listed.engine.remote:
            return None
        run_dir = Path(self.listed.engine.run_dir)
        return run_dir if run_dir.is_dir() else self.listed.folder.parent.parent

    def kept(self, what: InspectWhat) -> Detail | None:
        """Return the record of the fault, its stacks and last steps."""
        fault = self.incident.fault
        details: dict[InspectWhat, Detail | None] = {"fault": fault, "stacks": fault.stacks, "rings": fault.rings}
        return details.get(what) or super().kept(what)
