"""Which engine is meant: the flag, PPCONSOLE_ENGINE, the current context, the only one of this user on this host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from ppengine.protocol.discovery import EndedEngine, EngineRecord, ended_engines, list_engines

from ppconsole.link.contexts import find_remote
from ppconsole.model.endings import ended_text

VARIABLE = "PPCONSOLE_ENGINE"


class NoEngine(Exception):
    """No engine runs here, or none that is meant."""


class SeveralEngines(Exception):
    """More than one could be meant; `records` are those."""

    def __init__(self, text: str, records: Sequence[EngineRecord]) -> None:
        super().__init__(text)
        self.records = list(records)


def find_engine(wanted: str | None = None, server_key: str | None = None) -> EngineRecord:
    """Return the live engine that `wanted` names by id, name, unique prefix of an id, context or tcp:// address.

    Raises NoEngine, which says how the engine of that name ended, SeveralEngines, or ContextError.
    """
    wanted = wanted or os.environ.get(VARIABLE) or None
    remote = find_remote(wanted, server_key)
    if remote is not None:
        here = [one for one in list_engines() if wanted in (one.id, one.name)]
        if here:
            text = f"{wanted!r} is a context and an engine here; name it by {remote.address} or {here[0].id}"
            raise SeveralEngines(text, here)
        return remote
    try:
        return choose(list_engines(), wanted)
    except NoEngine as error:
        ended = newest_ended(wanted)
        if ended is None:
            raise
        text = ended_text(ended, time.time())
        look = f"see it: ppconsole -e {ended.record.id} explain"
        raise NoEngine(f"{text}; {look}" if wanted else f"{error}; the last one, {text}; {look}") from None


def find_far(wanted: str | None = None) -> EngineRecord | None:
    """Return the engine on another host that `wanted` names; None: it names one of this host. Raises ContextError."""
    return find_remote(wanted or os.environ.get(VARIABLE) or None)


def find_any(wanted: str | None = None, server_key: str | None = None) -> EngineRecord | EndedEngine:
    """Return a live engine, otherwise the one that ended last and that `wanted` names. Raises as `find_engine`."""
    wanted = wanted or os.environ.get(VARIABLE) or None
    try:
        return find_engine(wanted, server_key)
    except NoEngine:
        ended = newest_ended(wanted) if wanted else None
        if ended is None:
            raise
        return ended


def newest_ended(wanted: str | None) -> EndedEngine | None:
    """Return the newest ended engine that `wanted` names by id, name or prefix of an id; with None, the newest."""
    wanted, engines = wanted or os.environ.get(VARIABLE) or None, ended_engines()
    if wanted is None:
        return next(iter(engines), None)
    matching = [one for one in engines if wanted in (one.record.id, one.record.name)]
    return next(iter(matching or [one for one in engines if one.record.id.startswith(wanted)]), None)


def choose(records: Sequence[EngineRecord], wanted: str | None) -> EngineRecord:
    """Return the one of `records` that `wanted` names; with None, the only one. Raises NoEngine, SeveralEngines."""
    if wanted is None:
        if not records:
            raise NoEngine("no engine runs here; start one: ppconsole demo, or ppconsole serve PROFILE")
        if len(records) > 1:
            raise SeveralEngines(f"{len(records)} engines run here; name one with -e: {_names(records)}", records)
        return records[0]
    matching = (
        [record for record in records if record.id == wanted]
        or [record for record in records if record.name == wanted]
        or [record for record in records if record.id.startswith(wanted)]
    )
    if not matching:
        here = f"here: {_names(records)}" if records else "none runs here"
        raise NoEngine(f"no engine has the id, id prefix or name {wanted!r}; {here}")
    if len(matching) > 1:
        raise SeveralEngines(
            f"{wanted!r} fits {len(matching)} engines: {_names(matching)}; give the whole id", matching
        )
    return matching[0]


def rediscover(record: EngineRecord) -> Callable[[], EngineRecord | None]:
    """Return a function that finds `record`'s engine again: by its id, else its successor by name, else None."""

    def again() -> EngineRecord | None:
        if record.remote:
            return record
        records = list_engines()
        for candidate in records:
            if candidate.id == record.id:
                return candidate
        named = [candidate for candidate in records if candidate.name == record.name]
        return named[-1] if named else None

    return again


def _names(records: Sequence[EngineRecord]) -> str:
    return ", ".join(f"{record.id} ({record.name})" for record in records)
