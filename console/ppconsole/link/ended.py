"""An engine that has ended, as a source: its last minutes, logs, audit log and newest fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Unpack

from ppengine.protocol import log_tail
from ppengine.protocol.control import InspectWhat
from ppengine.protocol.discovery import EndedEngine
from ppengine.protocol.incidents import newest_incident
from ppengine.protocol.inspection import AuditDetail, LogsDetail
from ppengine.protocol.recording import LinkState, Update
from ppengine.protocol.severity import Level, is_at_least
from ppengine.protocol.snapshot import Event

from ppconsole.link.history import History, segments
from ppconsole.link.kept_finished import KeptFinished
from ppconsole.link.kept_requests import KeptRequest, find_request, kept_segments
from ppconsole.link.replay import ReplaySource
from ppconsole.link.source import Detail, InspectOptions, QueryFailed
from ppconsole.model.endings import end_words

_READ_MOST = 100_000
"""Events among which those of a level are looked for."""


def kept_detail(ended: EndedEngine, what: InspectWhat, options: InspectOptions, until: float = float("inf")) -> Detail:
    """Return a detail from the kept files of an engine; requests and logs as of `until` (Unix seconds).

    Raises QueryFailed if there is none.
    """
    folder, lines = ended.folder, options.get("lines", 200)
    if what == "logs":
        return LogsDetail(lines=log_tail.tail(folder, lines, options.get("stage"), until))
    if what == "request":
        return _kept_request(ended, options.get("request") or "", until)
    if what == "audit":
        return AuditDetail(lines=log_tail.last_lines(folder / "audit.jsonl", lines))
    if what == "finished":
        return KeptFinished(sorted(segments([folder / "history"]))).before(ended.end.wall)
    incident = newest_incident(folder) if what in ("fault", "stacks", "rings") else None
    detail: Detail | None = None
    if incident is not None and what == "fault":
        detail = incident.fault
    elif incident is not None and incident.info.over_wall is None:  # otherwise they are older than the end
        detail = incident.fault.stacks if what == "stacks" else incident.fault.rings
    if detail is None:
        raise QueryFailed("NOT_FOUND", f"the kept files have no {what}: {end_words(ended.end)}")
    return detail


def _kept_request(ended: EndedEngine, request: str, until: float) -> KeptRequest:
    """Return the last state of a request. Raises QueryFailed if no picture and no event of it was kept."""
    found = find_request(kept_segments(ended.folder), request, until)
    if found is None:
        text = f"request {request!r} is in no picture and no event that was kept; see status and events"
        raise QueryFailed("NOT_FOUND", f"{text}: {end_words(ended.end)}")
    return found


class EndedSource(ReplaySource):
    """Shows the last moment; from there the last hour can be played again."""

    kind = "ended engine"

    def __init__(self, ended: EndedEngine) -> None:
        """Read the kept files."""
        self.ended = ended
        past = History.of_segments(segments([ended.folder / "history"]))
        super().__init__(past, begin=past.end, paused=True)

    def events(self, most: int, level: Level = "info") -> list[Event]:
        """Return its last events of a level and above."""
        read = most if level == "info" else _READ_MOST
        kept = self.history.at(self.history.end, read, float("inf")).events
        found = [event for event in kept if is_at_least(event, level)]
        return found[max(0, len(found) - most) :]

    async def start(self, on_update: Callable[[Update], None]) -> None:
        """Deliver the last moment, and that the engine has ended."""
        await super().start(on_update)
        self._report_end()

    async def inspect(self, what: InspectWhat, **options: Unpack[InspectOptions]) -> Detail:
        """Return a detail from the kept files. Raises QueryFailed if there is none."""
        if what == "finished":  # up to the position
            return await super().inspect(what, **options)
        at_end = self.position >= self.history.end  # the last words in the logs come after the last picture
        until = float("inf") if at_end else self.position
        return await asyncio.to_thread(kept_detail, self.ended, what, options, until)

    def _report_end(self) -> None:
        """Say how the engine ended."""
        self._emit(LinkState(state="ended", text=end_words(self.ended.end)))
        self.finished.set()
