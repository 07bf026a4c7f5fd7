"""The wait chain, as numbers of stages and ranks instead of words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from ppengine.protocol.snapshot import WaitInfo

CORE = -1
_STAGE = re.compile(r"stage (\d+)(?: rank (\d+))?$")
_LINK = re.compile(r"the link from stage (\d+)(?: rank (\d+))? to stage (\d+)(?: rank (\d+))?$")


class Arrow(NamedTuple):
    """`waiter` and `on` are stages, or the core; `link`: it waits for the link to that stage, not for the stage.

    `waiter_rank` and `on_rank` are their tensor ranks; None: the whole stage.
    """

    waiter: int
    on: int
    link: bool
    what: str
    since_s: float
    waiter_rank: int | None = None
    on_rank: int | None = None


def arrows(waits: Iterable[WaitInfo]) -> list[Arrow]:
    """Return the waits between two different ones; what cannot be understood is left out.

    A thread counts as its stage; a wait of a stage for its own send thread is none.
    """
    found = []
    for wait in waits:
        waiter, on = _place(wait.waiter), _place(wait.on)
        link = _LINK.search(wait.on)
        if link is not None and waiter is not None:
            ends = _numbers(link[1], link[2]), _numbers(link[3], link[4])
            on = ends[1] if waiter[0] == ends[0][0] else ends[0]
        if waiter is not None and on is not None and waiter != on:
            found.append(Arrow(waiter[0], on[0], link is not None, wait.what, wait.since_s, waiter[1], on[1]))
    return found


def _place(text: str) -> tuple[int, int | None] | None:
    """Return stage and rank of a party to a wait; None if it is neither a stage nor the core."""
    if text == "the engine core":
        return CORE, None
    match = _STAGE.search(text)
    return _numbers(match[1], match[2]) if match else None


def _numbers(stage: str, rank: str | None) -> tuple[int, int | None]:
    return int(stage), None if rank is None else int(rank)
