"""Ordering the streams of two processes: each waits, on its device, for words that the other one's device writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.edge_flags import PAGE, Word, Words
from ppengine.stage.ledger.actors import Buffer, Mark

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver

_KEPT = 64
"""Numbers of an edge that may still be waited for: more than it has slots, or returns."""


class Signals:
    """The words of one edge as this side's compute stream uses them."""

    def __init__(self, driver: Driver, path: Path, create: bool, compute: Stream, peer: int) -> None:
        """Map the file and show it to the device. Raises OSError, ValueError, DriverError."""
        self._driver, self._stream = driver, compute
        self._ledger = compute.order.ledger
        self._peer = self._ledger.peer(f"stage {peer}")
        self._ours: dict[int, Mark] = {}
        self._theirs: dict[int, Mark] = {}
        """By number: points behind the words that this side writes, and that the other one does."""
        self._words = Words(path, create)
        try:
            self._device = driver.show(self._words.address, PAGE)
        except BaseException:
            self._words.close()
            raise

    def wait(self, word: Word, number: int) -> None:
        """Let what follows on the stream wait until `word` is `number` or more."""
        if self._words.value(word) < number:  # else it is there already, and a launch less
            self._driver.wait_for(self._device + word, number, self._stream.handle)
        if self._ledger.on:
            mark = self._theirs.get(number)
            self._ledger.wait(self._stream.actor, mark and mark._replace(via=word.name))

    def write(self, word: Word, number: int) -> None:
        """Write `number` into `word` when all before it on the stream is done."""
        self._driver.write_word(self._device + word, number, self._stream.handle)
        if self._ledger.on:
            _keep(self._ours, number, self._ledger.record(self._stream.actor, word.name))

    def peer_does(
        self, number: int, what: str, after: int = 0, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        """Tell the ledger, where it is on, what the other side does before it writes `number`.

        `after` is the number of this side that it waits for; 0: none.
        """
        if self._ledger.on:
            mark = self._ledger.peer_does(self._peer, what, self._ours.get(after), reads, writes, depth=1)
            _keep(self._theirs, number, mark)

    def release(self, word: Word) -> None:
        """Let go what waits for `word`; any thread may."""
        self._words.release(word)

    def close(self) -> None:
        """Take the words from the device and unmap them; the stream must be done with them."""
        self._driver.unpin(self._words.address)
        self._words.close()


def _keep(marks: dict[int, Mark], number: int, mark: Mark) -> None:
    marks[number] = mark
    if len(marks) > _KEPT:
        del marks[next(iter(marks))]
