"""The events of one link: in order, with the backlog of a fresh link, and with replays of those that were lost."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

from ppengine.protocol.control import Replay, Replayed
from ppengine.protocol.severity import Level
from ppengine.protocol.snapshot import Event

from ppconsole.link.attachment import Session
from ppconsole.link.order import EventOrder
from ppconsole.link.source import LinkLost, QueryFailed

BEHIND_S = 0.5
"""Seconds after which the newest event counts as lost: no later one shows the gap."""


class EventFeed:
    """Delivers each event of an epoch once. `begin` an epoch, `attach` each session, `take` what comes."""

    def __init__(
        self,
        warnings: int,
        newest_of: Callable[[Level, int, int], Awaitable[list[Event]]],
        *,
        deliver: Callable[[Event], None],
        show: Callable[[Event], None],
        jitter_s: float,
    ) -> None:
        """`warnings`: how many of those before the backlog to `show`. `newest_of`: asks the engine for them."""
        self._warnings, self._newest_of = warnings, newest_of
        self._deliver, self._show, self._jitter_s = deliver, show, jitter_s
        self._order = EventOrder()
        self._before = 0
        """Sequence up to which warnings and errors are still to be asked for; 0: none."""
        self._held: list[Event] | None = None
        """Events that wait for those warnings: live ones may come first."""
        self._session: Session | None = None
        self._behind_since: float | None = None
        self._catch_up: asyncio.Task[None] | None = None

    def begin(self, last: int) -> None:
        """Begin an epoch behind event `last`."""
        self._order = EventOrder(last)
        self._before = last if self._warnings else 0
        self._held = [] if self._before else None

    def attach(self, session: Session, newest: int) -> None:
        """Ask a fresh session for the events up to `newest` that were missed."""
        self._session, self._behind_since = session, None
        if self._order.last < newest or self._before:
            self._replay(newest, 0.0)

    async def detach(self) -> None:
        """Leave the session; a replay that is open ends."""
        self._session = None
        catch_up, self._catch_up = self._catch_up, None
        if catch_up is not None:
            catch_up.cancel()
            await asyncio.gather(catch_up, return_exceptions=True)

    def reach(self, newest: int, now: float) -> None:
        """Note the newest event of a snapshot, and ask for it if it does not come."""
        if newest <= self._order.last:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        elif now - self._behind_since > BEHIND_S:
            self._behind_since = None
            self._replay(newest, self._jitter_s)

    def take(self, events: list[Event]) -> None:
        """Take events as they come, and ask for those that are missing between."""
        for event in events:
            self._give(self._order.take(event))
        if events and self._order.missing is not None:
            self._replay(events[-1].seq, self._jitter_s)

    def _give(self, events: list[Event]) -> None:
        if self._held is not None:
            self._held += events
            return
        for event in events:
            self._deliver(event)

    def _replay(self, newest: int, jitter_s: float) -> None:
        """Request the missing events, unless such a request is open."""
        if self._catch_up is None or self._catch_up.done():
            self._catch_up = asyncio.create_task(self._fill(newest, jitter_s))

    async def _fill(self, newest: int, jitter_s: float) -> None:
        session, order = self._session, self._order
        await asyncio.sleep(random.uniform(0.0, jitter_s))  # many consoles lose the same event at once
        if session is None:
            return
        with contextlib.suppress(LinkLost):
            await self._fill_warnings()
        if order.last >= newest:
            return
        missing = order.missing
        question = Replay(nonce=0, after=order.last, until=missing[1] if missing else newest)
        try:
            answer = await session.ask(question)
        except (LinkLost, QueryFailed):
            self._give(order.fill([], newest))
            return
        if isinstance(answer, Replayed):
            self._give(order.fill(answer.events, answer.newest if answer.gone else newest))

    async def _fill_warnings(self) -> None:
        """Show the warnings and errors before the backlog, and then deliver held events. Raises LinkLost."""
        before, self._before = self._before, 0
        if not before:
            return
        try:
            with contextlib.suppress(QueryFailed):
                for event in await self._newest_of("warning", self._warnings, before):
                    self._show(event)
        finally:
            held, self._held = self._held or [], None
            self._give(held)
