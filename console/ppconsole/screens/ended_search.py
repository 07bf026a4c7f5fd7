"""The search for a request by a part of its id, among those that have ended: `/` finds it although it is gone."""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.inspection import FinishedDetail
from ppengine.protocol.kept_files import engine_folder

from ppconsole.link.history import segments
from ppconsole.link.kept_finished import KeptFinished
from ppconsole.link.replay import ReplaySource
from ppconsole.link.source import QueryFailed
from ppconsole.screens.console import Console

_PART = re.compile(r"[^\s:=<>!\"]+")
"""One plain word of a filter."""


class Found(NamedTuple):
    """Requests whose id has the word, the newest end first."""

    ended: list[FinishedInfo]
    listed: bool
    """Whether the engine lists them, as the Finished screen does; else they are from the record of its last hour."""


def may_be_id(text: str) -> bool:
    """Return whether a filter is one plain word, which may be a part of an id."""
    return _PART.fullmatch(text.strip()) is not None


async def find_ended(console: Console, word: str) -> Found:
    """Return the ended requests with `word` in their id. Raises LinkLost, and QueryFailed if no list is kept."""
    source, failed = console.source, None
    try:
        detail = await source.inspect("finished")
        known = detail.requests if isinstance(detail, FinishedDetail) else []
    except QueryFailed as error:
        known, failed = [], error
    if found := [one for one in known if has(one, word)]:
        return Found(found, listed=True)
    kept = await _kept(console, word)
    if failed is not None and not kept:
        raise failed
    return Found(kept, listed=False)


async def _kept(console: Console, word: str) -> list[FinishedInfo]:
    """Return those of the record, which has more than the engine lists."""
    source, snapshot = console.source, console.model.state.snapshot
    if isinstance(source, ReplaySource):
        return await asyncio.to_thread(source.ended_with, word)
    if snapshot is None:
        return []
    record = KeptFinished(sorted(segments([engine_folder(snapshot.engine.id) / "history"])))
    return await asyncio.to_thread(record.with_id, word)


def has(request: FinishedInfo, word: str) -> bool:
    """Return whether the id of a request has `word` in it, in upper or lower case."""
    return word.casefold() in request.id.casefold()
