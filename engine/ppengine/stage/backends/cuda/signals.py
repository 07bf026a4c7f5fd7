"""Ordering the streams of two processes: each waits, on its device, for flags that the other one's device writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.edge_flags import PAGE, EdgeFlags, Flag
from ppengine.stage.ledger.actors import Buffer, Mark

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver  # needs cuda-bindings

_KEPT = 64
"""Numbers of an edge that may still be waited for: more than it has slots, or returns."""


class Signals:
    """The flags that this side shares with `peer`.

    Its compute stream waits for them, and writes them, unless there is a `writer`.
    """

    def __init__(
        self, driver: Driver, path: Path, create: bool, compute: Stream, peer: str, writer: Stream | None = None
    ) -> None:
        """Map the file and show it to the device. Raises OSError, ValueError, DriverError."""
        self._driver, self._stream, self._writer = driver, compute, writer or compute
        self._ledger = compute.order.ledger
        self._peer = self._ledger.peer(peer)
        self._ours: dict[int, Mark] = {}
        self._theirs: dict[int, Mark] = {}
        """By number: points behind the flags that this side writes, and that the other one does."""
        self._flags = EdgeFlags(path, create)
        try:
            self._device = driver.show(self._flags.address, PAGE)
        except BaseException:
            self._flags.close()
            raise

    def wait(self, flag: Flag, number: int) -> None:
        """Let all later launches on the compute stream wait until `flag` is `number` or more."""
        if self._flags.value(flag) < number:  # otherwise it is there already: one launch less
            self._driver.wait_for(self._device + flag, number, self._stream.handle)
        if self._ledger.on:
            mark = self._theirs.get(number)
            self._ledger.wait(self._stream.actor, mark and mark._replace(via=flag.name))

    def write(self, flag: Flag, number: int, by: Stream | None = None) -> None:
        """Launch the write of `number` into `flag`, behind all earlier work on the stream that writes, or on `by`."""
        writer = by or self._writer
        self._driver.write_word(self._device + flag, number, writer.handle)
        if self._ledger.on:
            _keep(self._ours, number, self._ledger.record(writer.actor, flag.name))

    def peer_does(
        self, number: int, what: str, after: int = 0, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()
    ) -> None:
        """Declare the other side's work before it writes `number`, if the ledger is on.

        `after` is the number of this side that it waits for; 0: none.
        """
        if self._ledger.on:
            mark = self._ledger.peer_does(self._peer, what, self._ours.get(after), reads, writes, depth=1)
            _keep(self._theirs, number, mark)

    def values(self) -> dict[Flag, int]:
        """Return the present values of the flags, none after `close`; any thread may call it."""
        return self._flags.values()

    def release(self, flag: Flag) -> None:
        """Let a device that waits for `flag` run on; any thread may call it, also after `close`."""
        self._flags.release(flag)

    def close(self) -> None:
        """Take the flags from the device and unmap them; the stream must be done with them."""
        self._driver.unpin(self._flags.address)
        self._flags.close()


def _keep(marks: dict[int, Mark], number: int, mark: Mark) -> None:
    marks[number] = mark
    if len(marks) > _KEPT:
        del marks[next(iter(marks))]
