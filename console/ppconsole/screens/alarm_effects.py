"""Effects of alarms in the console: marks, the bell, a line in the log, and commands with a live engine alone."""

from __future__ import annotations

import time
from collections.abc import Callable

from ppengine.protocol.snapshot import Event

from ppconsole.link.alarm_commands import AlarmCommands
from ppconsole.model.thresholds import AlarmConfig, Watches
from ppconsole.screens.console import Console


class AlarmEffects:
    """Looks at each snapshot. A read-only console and a recording run no command and ring no bell."""

    def __init__(self, console: Console, config: AlarmConfig, ring: Callable[[], None]) -> None:
        self._console, self._ring = console, ring
        self._watches = Watches(config, console.model.now)
        self._commands = AlarmCommands(self._ended)

    def look(self) -> None:
        """Take the newest snapshot."""
        model = self._console.model
        snapshot = model.state.snapshot
        if snapshot is None:
            return
        acts = self._console.source.live and not model.state.read_only
        for alarm in self._watches.look(snapshot):
            if alarm.metric != "incident" or alarm.command or alarm.bell:
                self._log("alarm.raised" if alarm.raised else "alarm.cleared", alarm.text)
            if acts and alarm.bell:
                self._ring()
            if acts:
                self._commands.run(alarm, snapshot.engine.id)
        model.marks = self._watches.marks

    def forget(self) -> None:
        """Begin with another engine."""
        self._watches.restart()
        self._console.model.marks = {}

    async def close(self) -> None:
        """Kill commands that are running: the console ends."""
        await self._commands.close()

    def _ended(self, text: str, failed: bool) -> None:
        self._log("alarm.failed" if failed else "alarm.command", text)
        self._console.paint_soon()

    def _log(self, kind: str, text: str) -> None:
        self._console.model.take(Event(seq=0, wall=time.time(), kind=kind, text=text))
