"""Wait until a console has done all that a key, a click or a pause of a test led to.

Textual waits until its process has used next to no processor time for 20 ms, two times a key. The event loop itself
says sooner whether anything is left to do.
"""

from __future__ import annotations

import asyncio
from asyncio.base_events import BaseEventLoop
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SOON_S = 1 / 50
"""Timers that are due so soon run first: the next picture of a screen is 1/60 s away."""


async def settled(min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Return once no task can go on, no thread works for one, and all timers that were soon due have run.

    Give up after `max_sleep` seconds, as Textual does: a task may never rest, and a thread be blocked.
    """
    loop: Any = asyncio.get_running_loop()
    assert isinstance(loop, BaseEventLoop)
    begin = loop.time()
    soon = begin + SOON_S
    while loop.time() < begin + max_sleep:
        await asyncio.sleep(0)
        if loop._ready:
            continue
        now = loop.time()
        waits = [min(due, soon) - now for due in _due(loop) if due <= soon]
        if _works(loop._default_executor):
            waits.append(0.001)
        if not waits:
            return
        await asyncio.sleep(max(0.0, min(waits)))


def _due(loop: Any) -> list[float]:
    """Return the times of all timers."""
    return [handle._when for handle in loop._scheduled if not handle._cancelled]


def _works(threads: ThreadPoolExecutor | None) -> bool:
    """Return whether a thread has work. An idle one has handed its last result to the loop before."""
    return threads is not None and threads._idle_semaphore._value < len(threads._threads)
