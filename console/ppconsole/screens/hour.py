"""Filling the trends from recordings: the hour before this console, or all of a past."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from ppengine.protocol.kept_files import engine_folder
from ppengine.protocol.snapshot import Snapshot

from ppconsole.link.replay import ReplaySource
from ppconsole.link.source import Source
from ppconsole.model.trends import PERIOD_S, POINTS_MOST, Point, Trends
from ppconsole.screens.console import Console


class HourFeed:
    """Reads in a thread, so that a large history stops no screen."""

    def __init__(self, console: Console, known: Sequence[Point] = ()) -> None:
        """`known`: the points of the past, where the live engine's are these; else they are read."""
        self._console, self._known = console, known
        self._leaving = threading.Event()
        self._past: Source | None = None
        """The past whose record was read."""

    def start(self) -> None:
        """Begin to read the hour of a live engine, or once all of a past; an export has no record."""
        console = self._console
        source, snapshot = console.source, console.model.state.snapshot
        if isinstance(source, ReplaySource):
            if source is not self._past:
                self._past = source
                if self._known:
                    console.model.put_record(self._known)
                    return
                console.run_worker(self._fill_past(source), name="trends", exit_on_error=False)
        elif snapshot is not None and source.live:
            work = self._fill(snapshot, console.model.trends)
            console.run_worker(work, name="trends", group="trends", exclusive=True, exit_on_error=False)

    def leave(self) -> None:
        """Stop a reading that is under way: the console ends."""
        self._leaving.set()

    async def _fill(self, snapshot: Snapshot, trends: Trends) -> None:
        from ppconsole.link.history import segments
        from ppconsole.link.kept_points import read_points

        paths, before = segments([engine_folder(snapshot.engine.id) / "history"]), snapshot.sampled_at
        since = before - POINTS_MOST * PERIOD_S
        trends.put_before(await asyncio.to_thread(read_points, paths, since, before, self._leaving))
        self._console.paint()

    async def _fill_past(self, source: ReplaySource) -> None:
        from ppconsole.link.kept_points import read_points

        always = float("inf")
        points = await asyncio.to_thread(read_points, source.history.paths, -always, always, self._leaving)
        if self._console.source is source:
            self._console.model.put_record(points)
            self._console.paint()
