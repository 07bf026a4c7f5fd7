"""The engines that run here, with the state of each."""

from __future__ import annotations

import asyncio

from ppengine.protocol.discovery import EngineRecord, list_engines
from ppengine.protocol.recording import Update
from ppengine.protocol.snapshot import Snapshot

from ppconsole.link.engine_link import EngineLink

SILENT = "no answer"


async def survey(timeout: float) -> list[tuple[EngineRecord, str]]:
    """Return every engine of this user with its state; one is silent after `timeout` seconds.

    Raises RuntimeDirError.
    """
    records = list_engines()
    states = await asyncio.gather(*(state_of(record, timeout) for record in records))
    return list(zip(records, states, strict=True))


async def state_of(record: EngineRecord, timeout: float) -> str:
    """Return the state in the engine's first snapshot, `no answer` if none came in time."""
    first: asyncio.Future[Snapshot] = asyncio.get_running_loop().create_future()

    def take(update: Update) -> None:
        if isinstance(update, Snapshot) and not first.done():
            first.set_result(update)

    link = EngineLink(record, backlog=0, read_only=True, passing=True)
    await link.start(take)
    try:
        async with asyncio.timeout(timeout):
            return (await first).engine.state
    except TimeoutError:
        return SILENT
    finally:
        await link.close()
