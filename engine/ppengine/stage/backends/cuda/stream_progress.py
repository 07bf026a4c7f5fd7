"""How far the streams of a stage are, written by the device itself into `device_page`.

A stream writes a word when a piece of its work begins, behind all that it waits for, and another
when it ends: two stream memory operations beside kernels and graph replays, not inside, where each
would repeat one constant. Nothing waits for them, on either side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppengine.common.device_page import PAGE_BYTES, DevicePage, Word, word_of
from ppengine.stage.backends.cuda.streams import Stream

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver  # needs cuda-bindings


class DeviceProgress:
    """All followed streams of one stage, for the thread that launches on them; `step` is the present one."""

    def __init__(self, page: DevicePage, driver: Driver) -> None:
        self.step = 0
        self.page = page
        self.driver = driver
        self.base = driver.show(page.address, PAGE_BYTES)
        """Address of the page as the device sees it."""

    def follow(self, stream: Stream) -> None:
        """Have the device write the progress of `stream.working()` from here on."""
        stream.progress = StreamProgress(self, stream)


class StreamProgress:
    """One stream: a block of it is one piece of work. A block that an exception ends stays begun."""

    def __init__(self, whole: DeviceProgress, stream: Stream) -> None:
        self._whole, self._handle = whole, stream.handle
        self._line = whole.page.add(stream.name)
        self._begun = whole.base + self._line + 8 * Word.BEGUN
        self._done = whole.base + self._line + 8 * Word.DONE
        self._count = 0
        self._word = 0

    def __enter__(self) -> None:
        whole = self._whole
        self._count += 1
        self._word = word_of(self._count, whole.step)
        whole.page.launched(self._line, self._word)
        whole.driver.write_word(self._begun, self._word, self._handle)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._whole.driver.write_word(self._done, self._word, self._handle)
