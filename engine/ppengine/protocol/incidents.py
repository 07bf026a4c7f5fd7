"""Incidents: faults that were, as files that outlive the engine (`kept_files.py` has the folder)."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from ppengine.protocol.inspection import FaultDetail
from ppengine.protocol.json_files import read_json_file
from ppengine.protocol.snapshot import Cause, Event, IncidentInfo, is_beside

FILE = "incident.json"


class Incident(msgspec.Struct, kw_only=True):
    """One incident. Beside its file lie the recordings of the minutes around it."""

    info: IncidentInfo
    fault: FaultDetail
    """The frozen record: last steps, waits and stacks."""
    consequences: list[str] = []
    """Summaries of the verdicts that were not its root."""
    events: list[Event] = []
    """Events from its first to its last moment, those with an author among them."""


def incident_folders(engine_folder: Path) -> list[Path]:
    """Return the folders of an engine's incidents, the oldest first."""
    found = [path for path in (engine_folder / "incidents").glob("*") if path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name))


def read_incident(folder: Path) -> Incident:
    """Return the incident in `folder`. Raises OSError, ValueError."""
    return read_json_file(folder / FILE, Incident)


def newest_incident(engine_folder: Path, beside: Cause | None = None) -> Incident | None:
    """Return the newest incident of an engine that can be read; None without any.

    `beside`: one of this cause, with which steps go on. None: one of the pipeline.
    """
    for folder in reversed(incident_folders(engine_folder)):
        with contextlib.suppress(OSError, ValueError):
            info = read_info(folder)
            if (info.cause if is_beside(info.cause, info.stage) else None) == beside:
                return read_incident(folder)
    return None


class _Brief(msgspec.Struct):
    """The part of an incident that a list needs; the record of the fault is large."""

    info: IncidentInfo


def read_info(folder: Path) -> IncidentInfo:
    """Return the summary of the incident in `folder`. Raises OSError, ValueError."""
    return read_json_file(folder / FILE, _Brief).info
