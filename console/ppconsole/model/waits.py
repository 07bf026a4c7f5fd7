"""The wait chain, as numbers of stages instead of words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ppengine.protocol.snapshot import WaitInfo

CORE = -1
_STAGE = re.compile(r"stage (\d+)$")
_LINK = re.compile(r"the link from stage (\d+) to stage (\d+)$")


class Arrow(NamedTuple):
    """`waiter` and `on` are stages, or the core; `link`: it waits for the link to that stage, not for the stage."""

    waiter: int
    on: int
    link: bool
    what: str
    since_s: float


def arrows(waits: Iterable[WaitInfo]) -> list[Arrow]:
    """Return the waits between two different ones; what cannot be understood is left out.

    A thread counts as its stage; a wait of a stage for its own send thread is none.
    """
    found = []
    for wait in waits:
        waiter, on = _place(wait.waiter), _place(wait.on)
        link = _LINK.search(wait.on)
        if link is not None and waiter is not None:
            ends = int(link[1]), int(link[2])
            on = ends[1] if waiter == ends[0] else ends[0]
        if waiter is not None and on is not None and waiter != on:
            found.append(Arrow(waiter, on, link is not None, wait.what, wait.since_s))
    return found


def _place(text: str) -> int | None:
    if text == "the engine core":
        return CORE
    match = _STAGE.search(text)
    return int(match[1]) if match else None
