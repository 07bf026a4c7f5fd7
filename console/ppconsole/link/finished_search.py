"""The search for a request that has ended: in the engine's list, and in the record of its last hour."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ppengine.protocol.finished import FINISHED_MOST, FinishedInfo
from ppengine.protocol.inspection import FinishedDetail
from ppengine.protocol.kept_files import engine_folder
from ppengine.protocol.snapshot import Snapshot

from ppconsole.link.engine_link import far_link
from ppconsole.link.history import segments
from ppconsole.link.kept_finished import KeptFinished
from ppconsole.link.replay import ReplaySource
from ppconsole.link.source import QueryFailed, Source
from ppconsole.model.endings import clock_text
from ppconsole.model.request_names import whole

Wanted = Callable[[str], bool]
"""Whether an id is one of those that are sought."""


class Recorded(NamedTuple):
    """Requests of the record, the newest end first, and the begin of that in Unix seconds; None: it is not here."""

    ended: list[FinishedInfo]
    since: float | None


class Found(NamedTuple):
    """Requests with a wanted id, the newest end first."""

    ended: list[FinishedInfo]
    listed: bool
    """Whether the engine lists them, as the Finished screen does; else they are from the record of its last hour."""
    kept: str
    """How many ended requests are kept, and since when, in words."""


async def list_ended(source: Source) -> list[FinishedInfo]:
    """Return the newest requests that have ended. Raises LinkLost, and QueryFailed if no list is kept."""
    detail = await source.inspect("finished")
    return detail.requests if isinstance(detail, FinishedDetail) else []


async def find_recorded(source: Source, snapshot: Snapshot | None, wanted: Wanted) -> Recorded:
    """Return those with a wanted id from the record, which has more than the engine lists.

    An engine on another host has no record here.
    """
    if isinstance(source, ReplaySource):
        return Recorded(await asyncio.to_thread(source.ended_with, wanted), None)
    if snapshot is None:
        return Recorded([], None)
    record = KeptFinished(sorted(segments([engine_folder(snapshot.engine.id) / "history"])))
    return Recorded(await asyncio.to_thread(record.with_id, wanted), record.since)


async def find_ended(source: Source, snapshot: Snapshot | None, wanted: Wanted) -> Found:
    """Return the ended requests with a wanted id. Raises LinkLost, and QueryFailed if no list is kept."""
    failed, listed = None, list[FinishedInfo]()
    try:
        listed = await list_ended(source)
    except QueryFailed as error:
        failed = error
    if found := [one for one in listed if wanted(one.id)]:
        return Found(found, listed=True, kept="")
    recorded = await find_recorded(source, snapshot, wanted)
    if failed is not None and not recorded.ended:
        raise failed
    return Found(recorded.ended, listed=False, kept=kept_text(source, listed, recorded.since))


def meant(text: str, ended: Sequence[FinishedInfo]) -> FinishedInfo | None:
    """Return the request that `text` names: an id, a unique part of one, or the one of its HTTP client.

    Raises AmbiguousError.
    """
    found = whole(text, (), [one.id for one in ended])
    return next((one for one in ended if one.id == found), None)


def kept_text(source: Source, listed: Sequence[FinishedInfo], since: float | None) -> str:
    """Return how many ended requests are kept, and since when. `since`: begin of the record in Unix seconds."""
    texts = []
    if source.live:
        oldest = f" (those since {clock_text(min(one.wall for one in listed))})" if listed else ""
        texts.append(f"the engine keeps the newest {FINISHED_MOST:,} that ended{oldest}")
    if since is not None:
        texts.append(f"its record begins at {clock_text(since)}")
    elif far_link(source) is not None:
        texts.append("its record is on its host")
    return ", ".join(texts)


def having(word: str) -> Wanted:
    """Want the ids that have `word` in them, in upper or lower case."""
    part = word.casefold()
    return lambda name: part in name.casefold()
