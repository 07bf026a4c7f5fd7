"""The last known state of a request, from the recordings that an engine keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.incidents import incident_folders
from ppengine.protocol.recording import Recording, RecordingError
from ppengine.protocol.snapshot import Event, RequestInfo

from ppconsole.link.history import segments, unique


class KeptRequest(msgspec.Struct, kw_only=True):
    """A request as the kept files have it; they hold no prompt, no output and no block table."""

    id: str
    as_of: float
    """Unix seconds of the newest of its picture and its events."""
    finished: str = ""
    """Finish reason and length, from the event of its end; empty: it had not ended."""
    ended: FinishedInfo | None = None
    """Figures of its end, from that event; None: it had not ended, or an older engine wrote none."""
    picture_wall: float | None = None
    """Unix seconds of the last snapshot that had it; None: none had it."""
    info: RequestInfo | None = None
    """The request in that snapshot."""
    events: list[Event] = []
    """Its events around that time, the oldest first."""


class _Picture(msgspec.Struct):
    """The requests of a snapshot; the rest is not decoded."""

    requests: list[RequestInfo] = []


class _Frame(msgspec.Struct):
    """An update in a recording, as far as it can be about a request."""

    at_s: float
    snapshot: _Picture | None = None
    event: Event | None = None


class _Found(NamedTuple):
    """The part of one segment that is about a request."""

    wall: float | None
    info: RequestInfo | None
    events: list[Event]


_frames = msgspec.msgpack.Decoder(_Frame)


def kept_segments(folder: Path) -> list[Path]:
    """Return the recordings in an engine's folder: its last hour, and the minutes around its incidents."""
    return segments([folder / "history", *incident_folders(folder)])


def find_request(paths: Iterable[Path], request: str, until: float = float("inf")) -> KeptRequest | None:
    """Return the last state of `request` up to `until` (Unix seconds); None if no recording has it.

    The newest recording is read first, and the older ones only until one has a picture of it. One that is damaged or
    still written counts up to its cut.
    """
    wall: float | None = None
    info: RequestInfo | None = None
    events: list[Event] = []
    for path in reversed(unique(paths)):
        ended = _end(events) is not None
        found = _in_segment(path, request, until)
        events = [*found.events, *events]
        if found.info is not None:
            wall, info = found.wall, found.info
        if info is not None or ended:  # A short request may be in no picture, but none is older than its last minute.
            break
    if info is None and not events:
        return None
    end = _end(events)
    text = "" if end is None else end.text.removeprefix(f"{request} ")
    as_of = max(events[-1].wall if events else 0.0, wall or 0.0)
    return KeptRequest(
        id=request, as_of=as_of, finished=text, ended=None if end is None else end.finished, picture_wall=wall,
        info=info, events=events,
    )  # fmt: skip


def _end(events: Iterable[Event]) -> Event | None:
    """Return the event of the request's end."""
    return next((event for event in events if event.kind == "request.finished"), None)


def _in_segment(path: Path, request: str, until: float) -> _Found:
    """Return everything that one recording has; a snapshot without the request's id in its bytes is not decoded."""
    needle = msgspec.msgpack.encode(request)
    wall: float | None = None
    newest: RequestInfo | None = None
    events: list[Event] = []
    with contextlib.suppress(RecordingError, ValueError, RecursionError):
        recording = Recording(path)
        for body in recording.bodies():
            if needle not in body:
                continue
            frame = _frames.decode(body)
            at = recording.header.recorded_at + frame.at_s
            if at > until:
                recording.close()
                break
            if frame.event is not None and frame.event.request == request:
                events.append(frame.event)
            if frame.snapshot is not None:
                found = next((each for each in frame.snapshot.requests if each.id == request), None)
                wall, newest = (wall, newest) if found is None else (at, found)
    return _Found(wall, newest, events)
