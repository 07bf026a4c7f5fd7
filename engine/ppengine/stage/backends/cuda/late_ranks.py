"""The ranks for which a card waits in a collective, by this rank's own memory: no kernel writes anything for it.

Calls that are kernels count themselves, and what another rank has sent lies in this rank's memory with the number of
its call. A rank that has not sent its part of the next call is late. Between two ranks that exchange copies, a page has
the numbers that both have sent. These come first: while a stream waits for such a number, no copy of another stream
ended on two H200, so the card's own memory could not be read.

A thread looks, because a call of the driver may block, and neither step loop nor control thread may. It asks the driver
for nothing unless the layers' stream has been in one piece of work for a while. Words are copied on a stream of their
own, and read at a later look, if the copy is done by then.

It notes the late ranks in the device's page. A rank that hangs between two calls sees the others in front of it, or
where it is itself: `ppengine.agent.late_claims` knows them apart. Some calls exchange twice. A rank that waits for the
second parts has noted that it has all first ones, so a rank that stops between both is late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from ppkernels.gpu import collectives

from ppengine.common.device_page import DevicePage
from ppengine.stage.backends.cuda.errors import DriverError
from ppengine.stage.edge_flags import RELEASED

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver  # needs cuda-bindings

TICK_S, AFTER_S = 0.1, 0.3
"""Seconds between two looks, and those of a piece of work before the memory is read."""
_HIGH = -1
"""Priority of the stream. Streams of it are no other's, and share no queue of the card with the others."""
Sent = Mapping[int, tuple[int, int]]
"""By rank: the numbers of the newest copies that it and this rank have sent."""


class CallMarks:
    """Addresses of the words that show the newest call of each rank, and their meaning."""

    def __init__(self, memory: int, counters: int, rank: int, size: int, part_bytes: int) -> None:
        self.peers = [peer for peer in range(size) if peer != rank]
        (_, second), _ = collectives.newest_of(rank, size, part_bytes)
        self.addresses = [counters, memory + second]
        """All words, of 8 bytes."""
        for peer in self.peers:
            flags, words = collectives.newest_of(peer, size, part_bytes)
            self._each = len(flags), len(words)
            self.addresses += [memory + offset for offset in (*flags, *words)]

    def behind(self, values: list[int]) -> set[int]:
        """Return the ranks that have not sent their part of the call after those that are complete here.

        `values`: the words at `addresses`, as signed numbers.
        """
        calls, second, flags, words = *values[:2], *self._each
        found = set()
        for number, peer in enumerate(self.peers):
            begin = 2 + number * (flags + words)
            theirs = values[begin : begin + flags + words]
            if second > calls:
                sent = theirs[flags - 1] > calls
            else:
                sent = any(flag > calls for flag in theirs[:flags])
                sent = sent or any(_ahead(word, calls) for word in theirs[flags:])
            if not sent:
                found.add(peer)
        return found


def _ahead(word: int, calls: int) -> bool:
    """Return whether a word is of a later call than `calls`; it has the lower half of its number. 0: of none."""
    return word != 0 and 0 < ((word >> 32) - calls) & 0xFFFFFFFF < 1 << 31


class LateRanks(threading.Thread):
    """Looks from its start on. `active` says whether the ranks have met; addresses are good in any case."""

    def __init__(self, driver: Driver, page: DevicePage, marks: CallMarks, sent: Callable[[], Sent]) -> None:
        super().__init__(name="late ranks", daemon=True)
        self.active = False
        self._driver, self._page, self._marks, self._sent = driver, page, marks, sent
        self._pieces: int | None = None
        """Number of the piece of work that the stream is in; None: it is in none."""
        self._since_s = 0.0
        self._before: tuple[int, Sent, set[int]] | None = None
        """Calls, 0 if unread, copies and late ranks at the look before, of the same piece."""

    def run(self) -> None:
        """Look ten times a second, for the life of the process."""
        try:
            self._driver.enter()
            self.prepare()
            while True:
                time.sleep(TICK_S)
                self.look(time.monotonic())
        except (DriverError, RuntimeError):
            # The context is lost. The stage's own last words say why, so nothing is logged behind them.
            self._page.late(0, ())

    def prepare(self) -> None:
        """Make stream, event and host memory: beside a kernel that hangs, memory may not be had."""
        self._stream = torch.cuda.Stream(self._driver.device, priority=_HIGH)  # type: ignore[no-untyped-call]
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._words = torch.empty(len(self._marks.addresses), dtype=torch.int64, pin_memory=True)
        self._copy()

    def look(self, now_s: float) -> None:
        """Note the late ranks if the stream is in one piece of work for long. Raises DriverError, RuntimeError."""
        line = self._page.layers() if self.active else None
        pieces = None if line is None or line.begun == line.done else line.begun.pieces
        if pieces is None or pieces != self._pieces:
            if self._before is not None:
                self._page.late(0, ())
            self._pieces, self._since_s, self._before = pieces, now_s, None
            return
        if now_s - self._since_s < AFTER_S:
            return
        sent = dict(self._sent())
        if late := {peer for peer, (theirs, ours) in sent.items() if theirs < ours < RELEASED}:
            self._note(pieces, (0, sent, late))
        elif self._event.query():  # type: ignore[no-untyped-call]
            values: list[int] = self._words.tolist()
            level = {peer for peer in self._marks.peers if _are_level(*sent.get(peer, (0, 0)))}
            self._note(pieces, (values[0], sent, self._marks.behind(values) & level))
            self._copy()

    def _note(self, pieces: int, seen: tuple[int, Sent, set[int]]) -> None:
        # A stream that goes on waits for one rank and then for another.
        self._page.late(pieces, seen[2] if seen == self._before else ())
        self._before = seen

    def _copy(self) -> None:
        host = self._words.data_ptr()
        for number, address in enumerate(self._marks.addresses):
            self._driver.to_host(host + 8 * number, address, 8, int(self._stream.cuda_stream))
        self._event.record(self._stream)


def _are_level(theirs: int, ours: int) -> bool:
    """Return whether two ranks have sent each other the same copies: calls then say who is late."""
    return theirs == ours < RELEASED
