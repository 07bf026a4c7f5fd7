"""Ends of engines, and faults that are over, in words."""

from __future__ import annotations

import time

from ppengine.protocol.discovery import EndedEngine
from ppengine.protocol.incidents import Incident
from ppengine.protocol.inspection import FinishedDetail
from ppengine.protocol.kept_files import EngineEnd
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import IncidentInfo, is_beside

from ppconsole.model.folding import alike
from ppconsole.model.ranks import short
from ppconsole.model.safe import clean
from ppconsole.model.units import age_text, wall_text

_DAY_S = 20 * 3600.0
_WITH_S = 1.0
"""Seconds before the end in which a fault is its consequence: the process that clears away notes the end."""


def clock_text(wall: float, now: float | None = None) -> str:
    """Return a time of day, with its date where that is not of the last hours. Both in Unix seconds."""
    old = abs((time.time() if now is None else now) - wall) > _DAY_S
    return wall_text(wall, "%b %d %H:%M" if old else "%H:%M:%S")


def end_words(end: EngineEnd) -> str:
    """Return when and why an engine ended: `ended 02:34:12: core ended: killed by SIGKILL`."""
    about = "" if end.noted else "about "
    return f"ended {about}{clock_text(end.wall)}: {clean(end.reason)}"


def ended_text(ended: EndedEngine, now: float) -> str:
    """Return which engine ended, when and why, on one line. `now`: Unix seconds."""
    record, end = ended.record, ended.end
    about = "" if end.noted else "about "
    when = f"{about}{clock_text(end.wall, now)}, {age_text(now - end.wall)} ago"
    return f"{clean(record.name)} ({record.id}) ended {when}: {clean(end.reason)}"


def record_limits(known: FinishedDetail) -> str:
    """Return how far back a record's list of ended requests goes; empty for an engine's own list."""
    texts = []
    if known.since is not None:
        texts.append(f"from the record since {clock_text(known.since)}; those that ended before are not kept")
    if known.unread:
        texts.append(f"{known.unread} of an older engine have no figures")
    return "; ".join(texts)


def incident_words(info: IncidentInfo, now: float) -> str:
    """Return one incident on a line: `02:34:12: stage 1 was killed by SIGKILL, healed in 1.9 s`."""
    return f"{clock_text(info.wall, now)}: {clean(info.summary)}, {outcome(info, now)}"


def where(info: IncidentInfo) -> str:
    """Return the place of an incident in tables: `1`, `1.0` if one rank of the stage is meant, `core`, or `-`."""
    if info.stage is None:
        return "-" if is_beside(info.cause, info.stage) else "core"
    return str(info.stage) if info.rank is None else short(Place(info.stage, info.rank), ranked=True)


def duration(info: IncidentInfo, now: float) -> str:
    """Return how long an incident lasted, or lasts by now; `?` where the engine ended in it."""
    if info.over_wall is None and info.ended:
        return "?"
    return age_text((now if info.over_wall is None else info.over_wall) - info.wall)


def outcome(info: IncidentInfo, now: float) -> str:
    """Return how an incident went on: `healed in 1.9s`, `for 3m by now`, or that the engine ended."""
    if info.over_wall is not None:
        return f"healed in {age_text(info.over_wall - info.wall)}"
    return "the engine ended" if info.ended else f"for {age_text(now - info.wall)} by now"


def follows_from(incident: Incident, end: EngineEnd) -> bool:
    """Return whether an incident came with the end and not before it; the death of the core is itself the end."""
    own = incident.info.cause == "core" and end.reason.startswith("core ")
    return not own and incident.info.wall > end.wall - _WITH_S


def consequences(incident: Incident) -> list[str]:
    """Return the consequences of an incident, one line for all stages that ended the same way.

    A supervisor whose core is dead kills the stages, and each of these ends is a verdict.
    """
    return [clean(text) for text in alike([*incident.consequences, *_raised(incident)])]


def _raised(incident: Incident) -> list[str]:
    """Return the verdicts that came up after the root, of a fault in which the engine ended."""
    if incident.info.over_wall is not None:
        return []
    root = incident.fault.verdict.summary
    raised = (event.text.partition(": ")[2] for event in incident.events if event.kind == "verdict.raised")
    return [text for text in dict.fromkeys(raised) if text != root and text not in incident.consequences]
