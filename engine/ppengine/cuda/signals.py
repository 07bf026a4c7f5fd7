"""Ordering the streams of two processes: each waits, on its device, for words that the other one's device writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ppengine.cuda.streams import Stream
from ppengine.stage.words import PAGE, Word, Words

if TYPE_CHECKING:
    from ppengine.cuda.driver import Driver


class Signals:
    """The words of one edge as this side's compute stream uses them."""

    def __init__(self, driver: Driver, path: Path, create: bool, compute: Stream) -> None:
        """Map the file and show it to the device. Raises OSError, ValueError, DriverError."""
        self._driver, self._stream = driver, compute.handle
        self._words = Words(path, create)
        try:
            self._device = driver.show(self._words.address, PAGE)
        except BaseException:
            self._words.close()
            raise

    def wait(self, word: Word, number: int) -> None:
        """Let what follows on the stream wait until `word` is `number` or more."""
        if self._words.value(word) < number:  # else it is there already, and a launch less
            self._driver.wait_for(self._device + word, number, self._stream)

    def write(self, word: Word, number: int) -> None:
        """Write `number` into `word` when all before it on the stream is done."""
        self._driver.write_word(self._device + word, number, self._stream)

    def release(self, word: Word) -> None:
        """Let go what waits for `word`; any thread may."""
        self._words.release(word)

    def close(self) -> None:
        """Take the words from the device and unmap them; the stream must be done with them."""
        self._driver.unpin(self._words.address)
        self._words.close()
