"""Filling the trends at attach: with the hour before this console, from the files that the engine keeps."""

from __future__ import annotations

import asyncio
import threading

from ppengine.protocol.kept_files import engine_folder
from ppengine.protocol.snapshot import Snapshot

from ppconsole.model.trends import Trends
from ppconsole.screens.console import Console


class HourFeed:
    """Reads in a thread, so that a large history stops no screen."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._leaving = threading.Event()

    def start(self) -> None:
        """Begin to read the hour of a live engine; a recording has its own time and reads nothing."""
        console = self._console
        snapshot = console.model.state.snapshot
        if snapshot is not None and console.source.live:
            work = self._fill(snapshot, console.model.trends)
            console.run_worker(work, name="trends", group="trends", exclusive=True, exit_on_error=False)

    def leave(self) -> None:
        """Stop a reading that is under way: the console ends."""
        self._leaving.set()

    async def _fill(self, snapshot: Snapshot, trends: Trends) -> None:
        from ppconsole.link.kept_points import read_points

        folder = engine_folder(snapshot.engine.id) / "history"
        trends.put_before(await asyncio.to_thread(read_points, folder, snapshot.sampled_at, self._leaving))
        self._console.paint()
