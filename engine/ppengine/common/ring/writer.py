"""Writing a ring, from the thread whose ring it is."""

from __future__ import annotations

import os
from pathlib import Path
from time import monotonic_ns as _now_ns

from ppengine.common import mapped_file
from ppengine.common.ring.layout import (
    DEFAULT_CAPACITY,
    GAUGE_OFFSET,
    HEADER_BYTES,
    MAGIC,
    NAME_BYTES,
    NAME_OFFSET,
    RECORD,
    Gauge,
    Phase,
    Word,
)

_pack = RECORD.pack_into
_HEADER_WORDS, _GAUGE_WORDS = HEADER_BYTES // 8, GAUGE_OFFSET // 8
_U32 = 0xFFFFFFFF
"""Steps, message numbers and contexts are recorded modulo 2**32: an engine may run for years."""
_DONE = 4
"""The word of a record that is written later."""
# Plain integers: they are looked up thousands of times a second.
_HEAD, _TICK_NS, _TICKS = int(Word.HEAD), int(Word.MAIN_TICK_NS), int(Word.MAIN_TICKS)


class RingWriter:
    """Writer side; owned by one thread. A record takes 1 µs, and ten times that behind work that emptied the caches.

    So `begin` and `part` are one frame each and touch little memory; what they share is written out twice.
    """

    __slots__ = ("_at", "_capacity", "_head", "_last", "_map", "_part", "_words", "generation")

    def __init__(self, path: Path, name: str, stage: int, rank: int, capacity: int = DEFAULT_CAPACITY) -> None:
        """Make the file, in place of a predecessor's: readers see a new pid."""
        self._map = mapped_file.make(path, HEADER_BYTES + capacity * RECORD.size)
        # Words of 8 bytes: written whole, and in less time than by packing.
        self._words = memoryview(self._map).cast("Q")
        self._capacity = capacity
        self._head = 0
        self._at, self._last = HEADER_BYTES, HEADER_BYTES + (capacity - 1) * RECORD.size
        self._part = 0
        """Word where the open part of a step will be ended; 0: there is none."""
        self.generation = 0
        encoded = name.encode()[:NAME_BYTES]
        self._map[NAME_OFFSET : NAME_OFFSET + len(encoded)] = encoded
        for word, value in ((Word.PID, os.getpid()), (Word.STAGE, stage), (Word.RANK, rank), (Word.CAPACITY, capacity)):
            self._words[word] = value
        self.phase(Phase.START)
        self._map[:8] = MAGIC

    def begin(
        self, kind: int, step: int = 0, peer: int = -1, size: int = 0, detail: int = 0, code: int = 0,
        begun_ns: int = 0, returned_ns: int = 0, done_ns: int = 0,
    ) -> int:  # fmt: skip
        """Record that an operation is begun and return its sequence number (from 1).

        `begun_ns` 0: now. The other times are given where they are known by now.
        """
        at, words = self._at, self._words
        word = at >> 3
        words[word] = 0  # goes first: packing keeps no order
        _pack(
            self._map, at, 0, kind, peer, step & _U32, begun_ns or _now_ns(), returned_ns, done_ns, size, detail & _U32,
            0, code, self.generation,
        )  # fmt: skip
        self._head = words[word] = words[_HEAD] = seq = self._head + 1
        self._at = at + 64 if at < self._last else HEADER_BYTES
        return seq

    def part(self, kind: int, step: int, peer: int = -1, size: int = 0, detail: int = 0) -> None:
        """Begin a part of a step where the part before it ends."""
        at, words, now = self._at, self._words, _now_ns()
        if self._part:
            words[self._part] = now
        word = at >> 3
        words[word] = 0
        _pack(self._map, at, 0, kind, peer, step & _U32, now, 0, 0, size, detail & _U32, 0, 0, self.generation)
        self._head = words[word] = words[_HEAD] = self._head + 1
        self._part = word + _DONE
        self._at = at + 64 if at < self._last else HEADER_BYTES

    def end_part(self) -> None:
        """End the last part of a step, if one is open."""
        if self._part:
            self._words[self._part] = _now_ns()
            self._part = 0

    def end(self, seq: int) -> None:
        """Record that the operation is done, unless the ring has lapped it."""
        if self._head - seq < self._capacity:
            self._words[_HEADER_WORDS + (seq - 1) % self._capacity * 8 + _DONE] = _now_ns()

    def tick(self) -> None:
        """Main loop: one more turn."""
        words = self._words
        words[_TICK_NS] = _now_ns()
        words[_TICKS] += 1

    def thread_tick(self) -> None:
        """Tick of the control thread, 10 Hz: distinguishes a thread that holds the GIL from one that waits."""
        self._words[Word.THREAD_TICK_NS] = _now_ns()

    def name_thread(self, thread: int) -> None:
        """Publish the kernel's id of the control thread."""
        self._words[Word.THREAD_ID] = thread

    def count(self, which: Word, more: int) -> None:
        """Add to a count in the header."""
        self._words[which] += more

    def phase(self, phase: Phase) -> None:
        """Declare what the stage is busy with."""
        self._words[Word.PHASE_NS] = _now_ns()
        self._words[Word.PHASE] = phase

    @property
    def phase_name(self) -> str:
        """Name of the declared phase, in lower case."""
        return Phase(self._words[Word.PHASE]).name.lower()

    def gauge(self, which: Gauge, value: int) -> None:
        """Publish one figure."""
        self._words[_GAUGE_WORDS + which] = value

    def close(self) -> None:
        """Unmap; the file stays for the readers until the engine's folder goes."""
        self._words.release()
        self._map.close()
