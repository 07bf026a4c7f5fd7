"""A console that writes down when it saw which root verdicts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from ppconsole.link.engine_link import EngineLink
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.recording import LinkState, Update
from ppengine.protocol.snapshot import Snapshot, Verdict
from serving import Operator


@dataclass(frozen=True)
class Seen:
    """The root verdicts of one snapshot. `at`: monotonic seconds of its arrival."""

    at: float
    roots: tuple[tuple[int | None, str], ...]
    verdicts: tuple[Verdict, ...]

    @property
    def ranks(self) -> list[int | None]:
        """The tensor ranks of the root verdicts."""
        return [verdict.rank for verdict in self.verdicts]


class Watcher(Operator):
    """Keeps the first snapshot of every change of the root verdicts."""

    def __init__(self, link: EngineLink) -> None:
        super().__init__(link)
        self.changes: list[Seen] = []
        self.lost_at: float | None = None
        self.news = asyncio.Event()

    def take(self, update: Update) -> None:
        """Take one update of the link."""
        super().take(update)
        if isinstance(update, LinkState) and update.state == "lost":
            self.lost_at = self.lost_at or time.monotonic()
            self.news.set()
        if not isinstance(update, Snapshot):
            return
        roots = [verdict for verdict in update.verdicts if verdict.root]
        seen = Seen(time.monotonic(), tuple((root.stage, root.cause) for root in roots), tuple(roots))
        before = self.changes[-1] if self.changes else Seen(0.0, (), ())
        if (seen.roots, seen.ranks) != (before.roots, before.ranks):
            self.changes.append(seen)
            self.news.set()

    @property
    def alarms(self) -> list[Verdict]:
        """The root verdicts so far, each as it was raised."""
        found, before = [], set()
        for seen in self.changes:
            found += [verdict for verdict in seen.verdicts if (verdict.stage, verdict.cause) not in before]
            before = set(seen.roots)
        return found

    async def root(self, until: float) -> Seen | None:
        """Return the first change to some root verdict; None when none came by monotonic time `until`."""
        while True:
            for seen in self.changes:
                if seen.roots:
                    return seen
            left = until - time.monotonic()
            if left <= 0 or self.lost_at is not None:
                return None
            self.news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), left)


@contextlib.asynccontextmanager
async def watch(record: EngineRecord, user: str = "drill", *, loading: bool = False) -> AsyncIterator[Watcher]:
    """Attach a watcher to an engine; yields it with its first snapshot that is not `loading`, or is that too."""
    link = EngineLink(record, find=lambda: record, user=user, backlog=0)
    watcher = Watcher(link)
    await link.start(watcher.take)
    try:
        await link.attached(20)
        await watcher.until(lambda picture: loading or picture.engine.state != "loading", "a first snapshot")
        yield watcher
    finally:
        await link.close()


def tell(watcher: Watcher) -> list[str]:
    """Return every alarm in words."""
    return [f"{alarm.cause} at {alarm.stage}: {alarm.summary}" for alarm in watcher.alarms]
