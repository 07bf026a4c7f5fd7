"""The abort of a submission after Ctrl-C."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from ppconsole.cli.session import say

if TYPE_CHECKING:
    from ppengine.protocol.control import Outcome, Refused

    from ppconsole.link.engine_link import EngineLink


async def abort_unnamed(link: EngineLink, asked: asyncio.Task[str | Refused | Outcome]) -> None:
    """Abort a request after Ctrl-C as soon as the engine names it: it would begin without a reader."""
    from ppconsole.link.source import LinkLost

    say("it is not accepted yet, and is aborted then; Ctrl-C leaves it")
    try:
        answer = await asked
    except LinkLost as error:
        say(str(error))
        return
    if isinstance(answer, str):
        await abort(link, answer)


async def abort(link: EngineLink, request: str) -> None:
    """Abort after Ctrl-C, and say what became of it; a second Ctrl-C leaves at once."""
    from ppengine.protocol.control import Refused
    from ppengine.protocol.verbs import Abort

    from ppconsole.link.source import LinkLost

    say(f"aborting {request}")
    try:
        end = await link.command(Abort(request=request), reason="interrupted", timeout=5.0)
    except LinkLost as error:
        say(f"{error}; to abort it: ppconsole abort {request}")
        return
    say(f"{request}: {end.text} ({end.code})" if isinstance(end, Refused) else f"{request}: {end.text}")
