"""A source that delivers the past at its own pace, with pause, seek and speed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Unpack

import msgspec
from ppengine.protocol import log_tail
from ppengine.protocol.control import InspectWhat
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.frames import decode_as
from ppengine.protocol.inspection import LogsDetail
from ppengine.protocol.recording import LinkState, RecordingError, RecordingHeader, Update

from ppconsole.link.history import History, Moment, Place
from ppconsole.link.kept_finished import KeptFinished
from ppconsole.link.kept_requests import find_request
from ppconsole.link.past import PastSource
from ppconsole.link.source import DETAILS, Detail, InspectOptions, QueryFailed

SPEEDS = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_GAP_S = 15.0
"""A longer time without any update between two segments is skipped: those minutes were not kept."""
_STEP_MOST_S = 120.0
"""A longer step is seldom followed by another one."""
_AHEAD_S = 0.05
"""Reading ahead in a thread would delay the drawing."""


class ReplaySource(PastSource):
    """A `Source` on a recording. `speed` 1 is the pace of the recording, 10 ten times that, 0 as fast as it goes.

    Raises RecordingError when the file is no recording; one that is cut short plays up to the cut, then is `lost`
    with that text. `finished` is set at the end, `error` holds the cut. `begin`: where it starts, in Unix seconds;
    `paused`: it does not move by itself.
    """

    def __init__(
        self, past: Path | History, speed: float = 1.0, *, begin: float | None = None, paused: bool = False
    ) -> None:
        if not 0 <= speed <= 10_000:
            raise ValueError(f"speed is {speed:g}; it must be 0 (as fast as it goes) to 10000")
        self.history = History(past) if isinstance(past, Path) else past
        self.speed = speed
        self.paused = paused
        self.finished = asyncio.Event()
        self._begin = begin
        self.on_rewind: Callable[[], None] = _nothing
        """Called before a moment is delivered that does not follow: the receiver forgets what it knows."""
        self.on_arrival: Callable[[], None] = _nothing
        """Called after such a moment was delivered."""
        self._emit: Callable[[Update], None] = lambda update: None
        self._goal: float | None = None
        """The moment to go to, in Unix seconds."""
        self._ahead: asyncio.Task[None] | None = None
        self._details: dict[InspectWhat, msgspec.Raw] = {}
        self._finished = KeptFinished(self.history.paths)
        self._player: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._next = self.history.first
        self._wall, self._since = self.history.begin if begin is None else begin, 0.0
        """The position at `_since` on the monotonic clock."""

    @property
    def error(self) -> RecordingError | None:
        """The damage at which the recording ends; None without any."""
        return self.history.error

    @property
    def header(self) -> RecordingHeader:
        """The recording's engine and time. Raises RecordingError where there is none."""
        if self.history.header is None:
            raise RecordingError("no recording of that time was kept")
        return self.history.header

    async def start(self, on_update: Callable[[Update], None]) -> None:
        """Begin to play."""
        self._emit = on_update
        self._since = time.monotonic()
        if self._begin is not None:
            await self._go(self._begin)
        self._player = asyncio.create_task(self._play())

    @property
    def log_folder(self) -> Path | None:
        """The folder with the log files of that time; None: they were not kept."""
        return None

    async def inspect(self, what: InspectWhat, **options: Unpack[InspectOptions]) -> Detail:
        """Return a detail as of the position. Raises QueryFailed if there is none."""
        until = self.position
        if what == "logs" and (folder := self.log_folder) is not None:
            lines, stage = options.get("lines", 200), options.get("stage")
            return LogsDetail(lines=await asyncio.to_thread(log_tail.tail, folder, lines, stage, until))
        if what == "request":
            request = options.get("request") or ""
            found = await asyncio.to_thread(find_request, self.history.paths, request, until)
            if found is None:
                raise QueryFailed("NOT_FOUND", f"this {self.kind} has no request {request!r} up to this moment")
            return found
        if what == "finished" and self.kept(what) is None:
            return await asyncio.to_thread(self._finished.before, until)
        return await super().inspect(what, **options)

    def ended_with(self, wanted: Callable[[str], bool]) -> list[FinishedInfo]:
        """Return the requests with a wanted id that had ended by now, the newest first. It reads files."""
        return self._finished.with_id(wanted, self.position)

    def kept(self, what: InspectWhat) -> Detail | None:
        """Return a detail as the recording had it last, up to now."""
        data = self._details.get(what)
        return None if data is None else decode_as(DETAILS[what], bytes(data))

    async def close(self) -> None:
        """Stop playing."""
        tasks = [task for task in (self._player, self._ahead) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.history.close()

    async def played(self) -> None:
        """Wait for the end. Raises the receiver's exception, which ends the play."""
        if self._player is not None:
            end = asyncio.create_task(self.finished.wait())
            await asyncio.wait({self._player, end}, return_when=asyncio.FIRST_COMPLETED)
            end.cancel()
            if self._player.done():
                self._player.result()

    # --- moving -------------------------------------------------------------------------------------------------

    @property
    def position(self) -> float:
        """The moment that is shown, in Unix seconds."""
        if self.paused or self._next is None:
            return self._wall
        return min(self._wall + (time.monotonic() - self._since) * self.speed, self.history.frame(self._next).wall)

    @property
    def goal(self) -> float:
        """The moment that will be shown after all `seek` so far, in Unix seconds."""
        return self.position if self._goal is None else self._goal

    def seek(self, wall: float) -> None:
        """Go to `wall` soon. The position is that of the picture: it changes once the new one was read."""
        self._goal = wall
        self._changed.set()

    async def _go(self, goal: float) -> None:
        """Read the moment at `goal` in a thread, and deliver everything that was known then.

        A record that is damaged there leaves the position.
        """
        before, wall = self._wall, min(max(goal, self.history.begin), self.history.end)
        try:
            moment = await asyncio.to_thread(self.history.at, wall)
        except RecordingError as error:
            self._emit(LinkState(state="lost", text=str(error)))
        else:
            self._arrive(wall, moment)
            self._read_ahead(2 * wall - before)
        if self._goal == goal:  # otherwise another key has come
            self._goal = None

    def _arrive(self, wall: float, moment: Moment) -> None:
        """Deliver a moment."""
        self._details, self._next = moment.details, moment.following
        self._move_clock(wall)
        self.on_rewind()
        for update in (moment.link, moment.snapshot, *moment.events):
            if update is not None:
                self._emit(update)
        self.on_arrival()

    def _read_ahead(self, wall: float) -> None:
        """Read the moment that another step of this length goes to, once the present one is on the screen."""
        if self._ahead is not None:
            self._ahead.cancel()
        if 0 < abs(wall - self._wall) <= _STEP_MOST_S:
            self._ahead = asyncio.create_task(self._prepare(wall))

    async def _prepare(self, wall: float) -> None:
        await asyncio.sleep(_AHEAD_S)
        await asyncio.to_thread(self.history.prepare, wall)

    def set_paused(self, paused: bool) -> None:
        """Pause, or go on."""
        wall = self.position
        self.paused = paused
        self._move_clock(wall)

    def set_speed(self, speed: float) -> None:
        """Change the pace."""
        wall = self.position
        self.speed = speed
        self._move_clock(wall)

    def _move_clock(self, wall: float) -> None:
        self._wall, self._since = wall, time.monotonic()
        self._changed.set()

    # --- playing ------------------------------------------------------------------------------------------------

    async def _play(self) -> None:
        while True:
            self._changed.clear()
            if self._goal is not None:
                await self._go(self._goal)
                continue
            if self._next is None:
                self._report_end()
            if self._next is None or self.paused:
                await self._changed.wait()
                continue
            try:
                async with asyncio.timeout(max(0.0, self._wait_s(self._next))):
                    await self._changed.wait()
            except TimeoutError:
                if not self._changed.is_set():
                    self._deliver(self._next)

    def _wait_s(self, place: Place) -> float:
        """Return the seconds until the next frame."""
        wall = self.history.frame(place).wall
        if not self.speed:
            return 0.0
        last = self.history.before(place)
        if last is not None and last[0] != place[0] and wall - self.history.frame(last).wall > _GAP_S:
            self._wall, self._since = wall, time.monotonic()
            return 0.0
        return (wall - self._wall) / self.speed - (time.monotonic() - self._since)

    def _deliver(self, place: Place) -> None:
        """Deliver the next frame."""
        wall = self.history.frame(place).wall
        try:
            recorded = self.history.read(place)
        except RecordingError as error:
            self.history.cut(place, error)
            self._next = None
            return
        if self.speed == 0:
            self._move_clock(wall)
        self._next = self.history.after(place)
        if self._next is None:
            self._wall = wall
        if recorded.detail is not None:
            self._details[recorded.detail.what] = recorded.detail.data
        if recorded.update is not None:
            self._emit(recorded.update)

    def _report_end(self) -> None:
        """Say that the recording is over, and why where it was cut short."""
        end = LinkState(state="recorded", text="end of the recording")
        self._emit(end if self.error is None else LinkState(state="lost", text=str(self.error)))
        self.finished.set()


def _nothing() -> None:
    """Do nothing."""
