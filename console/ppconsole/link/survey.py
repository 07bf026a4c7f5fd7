"""The engines that run here, with the state of each."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from ppengine.protocol.discovery import EngineRecord, list_engines
from ppengine.protocol.recording import Update
from ppengine.protocol.snapshot import Snapshot

from ppconsole.link.engine_link import EngineLink
from ppconsole.model.facts import fault_word

SILENT = "no answer"


class Surveyed(NamedTuple):
    """One engine. `word`: the effect of its fault, as `stuck`, or else its state."""

    record: EngineRecord
    state: str
    word: str


async def survey(timeout: float) -> list[Surveyed]:
    """Return every engine of this user with its state; one is silent after `timeout` seconds.

    Raises RuntimeDirError.
    """
    records = list_engines()
    states = await asyncio.gather(*(state_of(record, timeout) for record in records))
    return [Surveyed(record, *both) for record, both in zip(records, states, strict=True)]


async def state_of(record: EngineRecord, timeout: float) -> tuple[str, str]:
    """Return state and word of the engine's first snapshot, both `no answer` if none came in time."""
    first: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()

    def take(update: Update) -> None:
        if isinstance(update, Snapshot) and not first.done():
            first.set_result(update)

    link = EngineLink(record, backlog=0, read_only=True, passing=True)
    await link.start(take)
    try:
        async with asyncio.timeout(timeout):
            snapshot = await first
        return snapshot.engine.state, fault_word(snapshot) or snapshot.engine.state
    except TimeoutError:
        return SILENT, SILENT
    finally:
        await link.close()
