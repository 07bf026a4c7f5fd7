"""The engine of `demo` and `tour`: the bundled model in two CPU stages, started by the command itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ppconsole.cli import exits
from ppconsole.cli.session import say

if TYPE_CHECKING:
    from ppengine.protocol.discovery import EngineRecord
    from ppengine.protocol.recording import Update
    from ppengine.protocol.snapshot import Snapshot

    from ppconsole.cli.launch import EngineProcess

PROFILE = "tiny"
START_S = 120.0
"""Seconds until it must serve."""


async def until_serving(engine: EngineProcess, limit_s: float) -> EngineRecord:
    """Wait until the engine serves, and say how far it is. Raises Failure with its last words."""
    from ppengine.protocol.snapshot import Snapshot

    from ppconsole.cli.options import Common
    from ppconsole.cli.session import attached, find

    notices = await engine.notices()
    say("starting two CPU stages on the bundled model")
    try:
        async with asyncio.timeout(limit_s):
            notice = await notices.get()
            if notice is None or notice.get("event") != "started":
                raise exits.Failure(_last_words(engine, notice))
            pictures: asyncio.Queue[Snapshot] = asyncio.Queue()
            ended = asyncio.create_task(notices.get())
            common = Common(engine=str(notice["id"]))
            record = find(common.engine)

            def take(update: Update) -> None:
                if isinstance(update, Snapshot):
                    pictures.put_nowait(update)

            # The engine reports the console that follows, and not this one.
            async with attached(common, take, passing=True):
                await _loaded(pictures, ended, engine)
            ended.cancel()
            return record
    except TimeoutError:
        text = f"the demo did not serve within {limit_s:g} s: {_last_words(engine, None)}"
        raise exits.Failure(text, exits.TIMEOUT) from None


async def _loaded(
    pictures: asyncio.Queue[Snapshot], ended: asyncio.Task[dict[str, Any] | None], engine: EngineProcess
) -> None:
    shown = ""
    while True:
        picture = asyncio.create_task(pictures.get())
        await asyncio.wait([picture, ended], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            picture.cancel()
            raise exits.Failure(_last_words(engine, ended.result()))
        info = picture.result().engine
        if info.state != "loading":
            return
        if info.message and info.message != shown:
            shown = info.message
            say(shown)


def _last_words(engine: EngineProcess, notice: dict[str, Any] | None) -> str:
    """Return why the engine ended, in one line."""
    if notice is not None and notice.get("reason"):
        return f"the demo's engine ended: {notice['reason']}"
    lines = [line for line in engine.messages if line.strip()]
    return f"the demo's engine ended: {lines[-1] if lines else 'it said nothing'}"
