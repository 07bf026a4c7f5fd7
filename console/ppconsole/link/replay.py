"""A source that delivers a recording at its own pace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from ppengine.protocol.control import InspectWhat
from ppengine.protocol.frames import decode_as
from ppengine.protocol.recording import LinkState, Recording, RecordingError, RecordingHeader, Update

from ppconsole.link.past import PastSource
from ppconsole.link.source import DETAILS, Detail


class ReplaySource(PastSource):
    """A `Source` on a file. `speed` 1 is the pace of the recording, 10 ten times that, 0 as fast as it goes.

    Raises RecordingError when the file is no recording; one that is cut short plays up to the cut, then is `lost`
    with that text. `finished` is set at the end, `error` holds the cut.
    """

    def __init__(self, path: Path, speed: float = 1.0) -> None:
        if not 0 <= speed <= 10_000:
            raise ValueError(f"speed is {speed:g}; it must be 0 (as fast as it goes) to 10000")
        self.recording = Recording(path)
        self.speed = speed
        self.error: RecordingError | None = None
        self._details: dict[InspectWhat, msgspec.Raw] = {}
        self._player: asyncio.Task[None] | None = None
        self.finished = asyncio.Event()

    @property
    def header(self) -> RecordingHeader:
        """The recording's engine and time."""
        return self.recording.header

    async def start(self, on_update: Callable[[Update], None]) -> None:
        """Begin to play."""
        self._player = asyncio.create_task(self._play(on_update))

    def kept(self, what: InspectWhat) -> Detail | None:
        """Return a detail as the recording had it last, up to now."""
        data = self._details.get(what)
        return None if data is None else decode_as(DETAILS[what], bytes(data))

    async def close(self) -> None:
        """Stop playing."""
        if self._player is not None:
            self._player.cancel()
            await asyncio.gather(self._player, return_exceptions=True)
        self.recording.close()

    async def played(self) -> None:
        """Wait for the end. Raises the receiver's exception, which ends the play."""
        if self._player is not None:
            await self._player

    async def _play(self, on_update: Callable[[Update], None]) -> None:
        begun = time.monotonic()
        end = LinkState(state="recorded", text="end of the recording")
        try:
            for recorded in self.recording.frames():
                wait = recorded.at_s / self.speed - (time.monotonic() - begun) if self.speed else 0.0
                await asyncio.sleep(max(0.0, wait))
                if recorded.detail is not None:
                    self._details[recorded.detail.what] = recorded.detail.data
                if recorded.update is not None:
                    on_update(recorded.update)
        except RecordingError as error:
            self.error, end = error, LinkState(state="lost", text=str(error))
        on_update(end)
        self.finished.set()
