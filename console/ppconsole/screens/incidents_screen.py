"""The Incidents screen: faults that were; Enter opens the diagnosis of one as it was."""

from __future__ import annotations

import asyncio
import time
from typing import ClassVar

from ppengine.protocol.discovery import EngineRecord, ended_engines, list_engines
from ppengine.protocol.snapshot import IncidentInfo
from textual.binding import Binding, BindingType

from ppconsole.link.engine_link import EngineLink, far_link
from ppconsole.link.incident_source import IncidentError, IncidentSource, Listed, list_incidents
from ppconsole.screens.console import Console
from ppconsole.screens.far_copies import copy_incident
from ppconsole.screens.reader import Reader
from ppconsole.view import incident_table
from ppconsole.view.cells import Row
from ppconsole.view.cursor import Cursor
from ppconsole.view.keys import INCIDENT_KEYS, Key


class IncidentsScreen(Reader):
    """Reads the kept files of the engine on the screen, and of earlier ones of its name, every five seconds."""

    topic: ClassVar[str] = "incidents"
    every_s: ClassVar[float] = 5.0
    keys: ClassVar[tuple[Key, ...]] = INCIDENT_KEYS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "diagnosis of that time", show=False),
        Binding("h", "play", "the minutes around it", show=False),
    ]

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._listed: list[Listed] | None = None
        """None: the list was not read yet."""
        self._cursor: Cursor[str] = Cursor()
        self._opening = False
        self._seen: tuple[IncidentInfo | None] | None = None
        """The newest incident at the list from another host; None: there is no list yet."""

    def heading(self) -> str:
        """Return the title."""
        return "INCIDENTS"

    def cli(self) -> str:
        """Return the command that prints the selected one."""
        one = self._chosen()
        return f"incidents {one.id}" if one is not None else "incidents"

    def body(self, width: int) -> list[Row]:
        """Return one row an incident, the newest first."""
        if self._listed is None:
            return []
        if not self._listed:
            snapshot, far = self.console.model.state.snapshot, far_link(self.console.source) is not None
            return incident_table.none_kept(None if snapshot is None or far else snapshot.incident)
        return incident_table.rows(self._listed, self._cursor.sync(self._ids()), time.time(), width)

    async def load(self) -> None:
        """Read the list, beside the loop: there may be a hundred files."""
        snapshot = self.console.model.state.snapshot
        if (link := far_link(self.console.source)) is not None:
            await self._load_far(link)
        elif snapshot is not None:
            self._listed = await asyncio.to_thread(_of_engine, snapshot.engine.id)

    async def _load_far(self, link: EngineLink) -> None:
        """Ask for the list if it can have changed: it may take a second on a slow link."""
        from ppconsole.link.far_past import FarPast

        snapshot = self.console.model.state.snapshot
        newest = None if snapshot is None else snapshot.incident
        if self._seen is None or self._seen != (newest,):
            self._listed = (await FarPast(link).incidents())[::-1]
            self._seen = (newest,)

    def _ids(self) -> list[str]:
        return [one.id for one in self._listed or ()]

    def _chosen(self) -> Listed | None:
        wanted = self._cursor.sync(self._ids())
        return next((one for one in self._listed or () if one.id == wanted), None)

    def action_scroll(self, by: int) -> None:
        """Move the selection, and keep it in view."""
        self._cursor.move(self._ids(), by)
        at, shown = self._cursor.index + 1, max(1, self.size.height - 2)
        if not self.top < at < self.top + shown:
            self.scroll_to_row(max(0, at - shown + 1 if at > self.top else at - 1))
        self.paint()

    def action_open(self) -> None:
        """Open the diagnosis as it was at the fault."""
        self._open(at_fault=True)

    def action_play(self) -> None:
        """Replay the minutes around the fault."""
        self._open(at_fault=False)

    def _open(self, *, at_fault: bool) -> None:
        one = self._chosen()
        if one is not None and not self._opening:
            self._opening = True
            self.run_worker(self._open_one(one, at_fault), exit_on_error=False, name=f"incident {one.id}")

    async def _open_one(self, one: Listed, at_fault: bool) -> None:
        try:
            link = far_link(self.console.source)
            if link is not None and await copy_incident(self.console, link, one) is None:
                return
            source = await asyncio.to_thread(lambda: IncidentSource(one, at_fault=at_fault))
            if source.history.first is None:
                self.console.report(
                    f"no recording of incident {one.id} was kept: ppconsole incidents {one.id}", bad=True
                )
                return
            self.console.open_past(source, f"incident {one.id}", diagnosis=at_fault)
        except IncidentError as error:
            self.console.report(str(error), bad=True)
        finally:
            self._opening = False


def _of_engine(engine_id: str) -> list[Listed]:
    """Return the incidents of an engine and of earlier ones of its name, the newest first."""
    records: list[EngineRecord] = [*list_engines(), *(one.record for one in ended_engines())]
    meant = next((record for record in records if record.id == engine_id), None)
    return [] if meant is None else list_incidents(meant)[::-1]
