"""Which engine is meant: the flag, else PPCONSOLE_ENGINE, else the only one of this user on this host."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from ppengine.protocol.discovery import EngineRecord, list_engines

VARIABLE = "PPCONSOLE_ENGINE"


class NoEngine(Exception):
    """No engine runs here, or none that is meant."""


class SeveralEngines(Exception):
    """More than one could be meant; `records` are those."""

    def __init__(self, text: str, records: Sequence[EngineRecord]) -> None:
        super().__init__(text)
        self.records = list(records)


def find_engine(wanted: str | None = None) -> EngineRecord:
    """Return the engine `wanted` names by id, name or unique prefix of an id. Raises NoEngine, SeveralEngines."""
    wanted = wanted or os.environ.get(VARIABLE) or None
    return choose(list_engines(), wanted)


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
        records = list_engines()
        for candidate in records:
            if candidate.id == record.id:
                return candidate
        named = [candidate for candidate in records if candidate.name == record.name]
        return named[-1] if named else None

    return again


def _names(records: Sequence[EngineRecord]) -> str:
    return ", ".join(f"{record.id} ({record.name})" for record in records)
