"""Programs that alarms run: never by a shell, one at a time for each rule, at most 30 s and not too often."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable

from ppconsole.model.safe import clean
from ppconsole.model.thresholds import Alarm

LIMIT_S = 30.0
APART_S = 60.0
"""A rule that is raised again sooner than this after its last command runs none, and none when it is cleared."""
_OUTPUT_BYTES = 4096
_BEHIND_MOST = 4


class AlarmCommands:
    """Runs inside one asyncio loop. `report` gets a line for each command that ends, and whether it failed."""

    def __init__(self, report: Callable[[str, bool], None], *, limit_s: float = LIMIT_S) -> None:
        self._report, self._limit_s = report, limit_s
        self._begun: dict[str, float] = {}
        self._left_out: set[str] = set()
        self._waiting: dict[str, list[tuple[Alarm, str]]] = {}
        """Alarms of each rule whose command is running or comes after it."""
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, alarm: Alarm, engine: str) -> None:
        """Run the command of an alarm soon."""
        if not alarm.command or self._is_left_out(alarm):
            return
        queue = self._waiting.setdefault(alarm.key, [])
        if len(queue) >= _BEHIND_MOST:
            self._report(f"{alarm.key}: no command, {len(queue)} are behind the one that runs", True)
            return
        queue.append((alarm, engine))
        if len(queue) > 1:
            return
        task = asyncio.create_task(self._drain(alarm.key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Kill the commands that are running."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def finished(self) -> None:
        """Wait until every command has ended."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    def _is_left_out(self, alarm: Alarm) -> bool:
        if not alarm.raised:
            out = alarm.key in self._left_out
            self._left_out.discard(alarm.key)
            return out
        now = time.monotonic()
        last = self._begun.get(alarm.key)
        if last is not None and now - last < APART_S and alarm.metric != "incident":
            self._left_out.add(alarm.key)
            self._report(f"{alarm.key}: no command, the last one began {now - last:.0f} s ago", False)
            return True
        self._begun[alarm.key] = now
        return False

    async def _drain(self, key: str) -> None:
        queue = self._waiting[key]
        try:
            while queue:
                text, failed = await self._one(*queue[0])
                self._report(f"{key}: {text}", failed)
                del queue[0]
        finally:
            queue.clear()

    async def _one(self, alarm: Alarm, engine: str) -> tuple[str, bool]:
        """Run one command; return how it ended, and whether it failed."""
        name = clean(alarm.command[0])
        try:
            process = await asyncio.create_subprocess_exec(
                *alarm.command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT, env={**os.environ, **environment(alarm, engine)},
                start_new_session=True,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            return f"{name} cannot be run: {getattr(error, 'strerror', None) or error}", True
        try:
            async with asyncio.timeout(self._limit_s):
                output = await _output(process)
                code = await process.wait()
        except TimeoutError:
            await _kill(process)
            return f"{name} was killed after {self._limit_s:g} s", True
        except asyncio.CancelledError:
            await _kill(process)
            raise
        said = " ".join(clean(output).split())
        return f"{name} ended with {code}" + (f": {said}" if said else ""), code != 0


def environment(alarm: Alarm, engine: str) -> dict[str, str]:
    """Return the variables that a command gets besides those of the console."""
    incident = "" if alarm.incident is None else str(alarm.incident)
    state = "raised" if alarm.raised else "cleared"
    given = {"METRIC": alarm.metric, "VALUE": alarm.value, "ENGINE": engine, "INCIDENT": incident, "STATE": state}
    return {f"PPCONSOLE_{name}": value for name, value in given.items()}


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a program and everything that it has started in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


async def _output(process: asyncio.subprocess.Process) -> str:
    """Return the begin of a program's output; the rest is read and dropped, so that it never waits for us."""
    assert process.stdout is not None
    kept = b""
    while piece := await process.stdout.read(65536):
        kept = (kept + piece)[:_OUTPUT_BYTES]
    return kept.decode(errors="replace")
