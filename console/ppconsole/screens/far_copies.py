"""Copies of the past of an engine on another host, for the screens: progress and errors are messages."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ppconsole.link.engine_link import EngineLink
from ppconsole.link.incident_source import Listed
from ppconsole.link.source import LinkLost, QueryFailed
from ppconsole.model.units import bytes_text
from ppconsole.screens.console import Console

if TYPE_CHECKING:
    from ppconsole.link.far_past import Copied, FarPast, Progress

_SHOWN_S = 0.5
"""Least seconds between two figures of the progress."""


async def copy_history(console: Console, link: EngineLink) -> Path | None:
    """Copy the last hour; return the folder of the copies, or None after a report of the obstacle."""
    return await _copy(console, link, "the last hour", lambda past, progress: past.copy_history(progress))


async def copy_incident(console: Console, link: EngineLink, one: Listed) -> Path | None:
    """Copy an incident with its minutes; return the folder of the copies, or None after a report of the obstacle."""
    return await _copy(console, link, f"incident {one.id}", lambda past, progress: past.copy_incident(one, progress))


async def _copy(
    console: Console, link: EngineLink, name: str, work: Callable[[FarPast, Progress], Awaitable[Copied]]
) -> Path | None:
    from ppconsole.link.far_past import FarPast

    shown = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= _SHOWN_S:
            shown = now
            console.report(f"fetching {name}: {bytes_text(done)} of {bytes_text(total)}", bad=False)

    try:
        copied = await work(FarPast(link), progress)
    except (LinkLost, QueryFailed) as error:
        console.report(f"{name} was not fetched: {error}", bad=True)
        return None
    except OSError as error:
        console.report(f"{name}: the copy cannot be written: {error.strerror}", bad=True)
        return None
    if copied.missing:
        console.report(copied.missing, bad=True)
    return copied.folder
