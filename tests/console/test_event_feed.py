"""Events of one link: older warnings are shown before all others, live ones included."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ppconsole.link.event_feed import EventFeed
from ppconsole.link.source import LinkLost
from ppengine.protocol.control import Replay, Replayed
from ppengine.protocol.snapshot import Event

LAST, NEWEST = 10, 13


def event(seq: int) -> Event:
    return Event(seq=seq, wall=0.0, kind="stage.dead", text=str(seq))


class Engine:
    """Answers a console once it may; `shown` are the numbers of events in the order of the log."""

    def __init__(self) -> None:
        self.shown: list[int] = []
        self.may = asyncio.Event()
        self.error: Exception | None = None
        self.feed = EventFeed(2, self.newest_of, deliver=self.show, show=self.show, jitter_s=0.0)
        self.asked: list[Replay] = []

    def show(self, event: Event) -> None:
        self.shown.append(event.seq)

    async def newest_of(self, level: str, most: int, until: int) -> list[Event]:
        assert (level, most, until) == ("warning", 2, LAST)
        await self.may.wait()
        if self.error is not None:
            raise self.error
        return [event(2), event(4)]

    async def ask(self, question: Replay) -> Any:
        self.asked.append(question)
        numbers = range(question.after + 1, question.until + 1)
        return Replayed(nonce=0, events=[event(seq) for seq in numbers], newest=NEWEST)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("live", [[], [11], [11, 12, 13], [12, 13], [11, 12, 13, 14]], ids=str)
async def test_live_events_wait_for_older_warnings(live: list[int]) -> None:
    engine = Engine()
    engine.feed.begin(LAST)
    session: Any = engine
    engine.feed.attach(session, NEWEST)
    engine.feed.take([event(seq) for seq in live])
    await settle()
    assert engine.shown == []
    engine.may.set()
    await settle()
    assert engine.shown == [2, 4, 11, 12, 13, 14][: max([5, *(seq - 8 for seq in live)])]
    assert len(engine.asked) == (max([0, *live]) < NEWEST or 11 not in live)
    engine.feed.take([event(15 if 14 in live else 14)])
    assert engine.shown[-1] == (15 if 14 in live else 14), "nothing is held any more"


async def test_a_link_that_breaks_loses_warnings_alone() -> None:
    engine = Engine()
    engine.error = LinkLost("gone", sent=True)
    engine.feed.begin(LAST)
    session: Any = engine
    engine.feed.attach(session, NEWEST)
    engine.feed.take([event(11)])
    engine.may.set()
    await settle()
    assert engine.shown == [11, 12, 13]


async def test_warnings_are_shown_where_nothing_is_missing() -> None:
    engine = Engine()
    engine.feed.begin(LAST)
    session: Any = engine
    engine.feed.attach(session, LAST)
    engine.may.set()
    await settle()
    assert engine.shown == [2, 4] and not engine.asked
