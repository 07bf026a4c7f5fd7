"""The recorder's ring: a small mmapped file that one thread writes and any process reads, without locks.

File: one header page, then `capacity` records of 64 bytes. The writer fills a record and then its `seq`
(commit last); the reader takes a record only if `seq` is the one that belongs there, before and after it read.
An operation is one record written twice: begun (`done_ns` 0) and ended; what is over by then is written once. So the
open operation of a thread is visible from outside whatever its process does, even when it is stopped or holds the GIL.
A message between stages is a record on each side, with its number on that edge: both sides together tell where it is.

All times are CLOCK_MONOTONIC nanoseconds, which on Linux is one clock for all processes of a host.
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path
from time import monotonic_ns as _now_ns
from typing import NamedTuple

from ppengine import mapped

MAGIC = b"PPRING\x00\x02"
HEADER_BYTES = 4096
_HEADER_WORDS = HEADER_BYTES // 8
RECORD = struct.Struct("<QHhIQQQQIIII")  # 64 bytes: see `Record`
DEFAULT_CAPACITY = 4096
_U64 = struct.Struct("<Q")
_NAME_OFFSET, _NAME_BYTES = 1024, 64
_GAUGE_OFFSET = 2048
_GAUGE_WORDS = _GAUGE_OFFSET // 8
_WORDS = struct.Struct("<12Q")
_pack = RECORD.pack_into
_DONE = 4
"""The word of a record that is written later."""
MAP_RING = "map"
"""Name of the ring of the thread that maps and unmaps a GPU's memory; other stages have none."""
DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
"""What messages are made of, in the order of their codes (from 1)."""


class Kind(IntEnum):
    """What an operation is."""

    IDLE = 0
    """Waits for a step from the core."""
    RECEIVE = 1
    """Main ring: waits for a message. Ring `receive`: a posted one, as `Record` says of messages."""
    EMBED = 2
    FORWARD = 3
    """Layers of the stage; `detail` is the number of the first one, `size` the tokens."""
    HEAD = 4
    SAMPLE = 5
    SEND = 6
    """Main ring: hands a message over, which is work of its own. Ring `send`: the message, as `Record` says."""
    SWAP_OUT = 7
    SWAP_IN = 8
    COPY = 9
    MAP = 10
    COLLECTIVE = 11
    STEP = 12
    """The whole step on this stage, from taking it up to retiring it; `size` its tokens, `detail` their context."""
    TOKEN_RETURN = 13
    """Waits for sampled tokens from the last stage."""
    LOAD = 14
    DEVICE = 15
    """Waits for a device to finish a step."""
    ROOM = 16
    """Inside a send: waits until fewer messages are under way, which is when the peer takes them."""
    ON_DEVICE = 17
    """What a device did for a step, by its own clock; `size` and `detail` as of STEP. Written once, when the step is
    retired: ended when the host saw it done, begun so much before as the device has measured, returned when it was
    through with layers and head, behind which it samples. Step 0: boot tried so many tokens."""


class Phase(IntEnum):
    """Declared phase of a stage; each has a budget of its own in the diagnosis."""

    START = 0
    LOAD = 1
    PROFILE = 2
    CAPTURE = 3
    COMPILE = 4
    SERVING = 5
    CLOSING = 6
    MEET = 7
    """Opens its edges in a generation; in a COLLECTIVE while it waits for a neighbour to come."""


class Word(IntEnum):
    """Header words (u64) behind the magic, in order."""

    HEAD = 1
    """Records ever begun."""
    PID = 2
    STAGE = 3
    RANK = 4
    THREAD = 5
    PHASE = 6
    PHASE_NS = 7
    MAIN_TICK_NS = 8
    MAIN_TICKS = 9
    THREAD_TICK_NS = 10
    CAPACITY = 11


# Plain integers: they are looked up thousands of times a second.
_HEAD, _TICK_NS, _TICKS = int(Word.HEAD), int(Word.MAIN_TICK_NS), int(Word.MAIN_TICKS)


class Gauge(IntEnum):
    """Figures that the stage publishes in the header of its main ring (u64 each)."""

    INBOX = 0
    OUTBOX = 1
    STEP_BEGUN = 2
    STEP_FINISHED = 3
    TOTAL_BYTES = 4
    WEIGHTS_BYTES = 5
    KV_MAPPED_BYTES = 6
    KV_RESERVED_BYTES = 7
    OTHER_BYTES = 8
    KV_BASE = 9
    KV_LENGTH = 10
    MAPPED_BLOCKS = 11
    SWAP_BLOCKS = 12
    BLOCK_BYTES = 13


_GAUGE_NAMES = tuple(gauge.name.lower() for gauge in Gauge)
_GAUGES = struct.Struct(f"<{len(Gauge)}Q")


class Record(NamedTuple):
    """One operation. `done_ns` 0: still open. `peer` -1: none (a stage index for receive and send).

    Of a message, in the rings `send` and `receive`: `size` is its bytes, `detail` its number on the edge (from 1),
    `code` its element type and row length (`shape_code`); handed to the transport, call returned, done.
    """

    seq: int
    kind: int
    peer: int
    step: int
    enqueued_ns: int
    returned_ns: int
    done_ns: int
    size: int
    detail: int
    stream: int
    code: int
    generation: int


Row = tuple[int, ...]
"""The fields of a `Record` in their order, without their names: thousands a second are read, and few are kept."""


def shape_code(dtype: str, width: int) -> int:
    """Return element type and row length of a message in 32 bits; 0 for a type that has no code."""
    return (DTYPES.index(dtype) + 1) << 24 | min(width, 0xFFFFFF) if dtype in DTYPES else 0


def shape_text(size: int, code: int) -> str:
    """Return `float32[7, 64] 1792 B` for `size` bytes of `shape_code` `code`."""
    kind, width = code >> 24, code & 0xFFFFFF
    if not 0 < kind <= len(DTYPES):
        return f"{size} B"
    name = DTYPES[kind - 1]
    digits = "".join(filter(str.isdigit, name))
    item = int(digits) // 8 if digits else 1
    rows = size // (item * width) if width else 0
    return f"{name}[{rows}, {width}] {size} B"


class RingWriter:
    """Writer side; owned by one thread. A record takes 1 µs, and ten times that behind work that emptied the caches.

    So `begin` and `part` are one frame each and touch little memory; what they share is written out twice.
    """

    __slots__ = ("_at", "_capacity", "_head", "_last", "_map", "_part", "_words", "generation")

    def __init__(self, path: Path, name: str, stage: int, rank: int, capacity: int = DEFAULT_CAPACITY) -> None:
        """Make the file, in place of a predecessor's: readers see a new pid."""
        self._map = mapped.make(path, HEADER_BYTES + capacity * RECORD.size)
        # Words of 8 bytes: written whole, and in less time than by packing.
        self._words = memoryview(self._map).cast("Q")
        self._capacity = capacity
        self._head = 0
        self._at, self._last = HEADER_BYTES, HEADER_BYTES + (capacity - 1) * RECORD.size
        self._part = 0
        """Word where the open part of a step will be ended; 0: there is none."""
        self.generation = 0
        encoded = name.encode()[:_NAME_BYTES]
        self._map[_NAME_OFFSET : _NAME_OFFSET + len(encoded)] = encoded
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
            self._map, at, 0, kind, peer, step & 0xFFFFFFFF, begun_ns or _now_ns(), returned_ns, done_ns, size, detail,
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
        _pack(self._map, at, 0, kind, peer, step & 0xFFFFFFFF, now, 0, 0, size, detail, 0, 0, self.generation)
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
        """Control thread, 10 Hz: tells a thread that holds the GIL from one that waits."""
        self._words[Word.THREAD_TICK_NS] = _now_ns()

    def phase(self, phase: Phase) -> None:
        """Declare what the stage is busy with."""
        self._words[Word.PHASE_NS] = _now_ns()
        self._words[Word.PHASE] = phase

    def gauge(self, which: Gauge, value: int) -> None:
        """Publish one figure."""
        self._words[_GAUGE_WORDS + which] = value

    def close(self) -> None:
        """Unmap; the file stays for the readers until the engine's folder goes."""
        self._words.release()
        self._map.close()


class RingReader:
    """Reader side, in another process. Never blocks and never trusts a torn record."""

    def __init__(self, path: Path) -> None:
        """Map the ring at `path`. Raises OSError, or ValueError for a file that is not (yet) a whole ring."""
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        size = len(self._map)
        whole = size > HEADER_BYTES and self._map[:8] == MAGIC
        if not whole or size != HEADER_BYTES + self.word(Word.CAPACITY) * RECORD.size:
            self._map.close()
            raise ValueError(f"{path} is not a recorder ring")
        self.name = self._map[_NAME_OFFSET : _NAME_OFFSET + _NAME_BYTES].rstrip(b"\x00").decode("utf-8", "replace")
        self._capacity = self.word(Word.CAPACITY)

    def word(self, which: Word) -> int:
        """Return one header word."""
        return int(_U64.unpack_from(self._map, which * 8)[0])

    def gauge(self, which: Gauge) -> int:
        """Return one published figure."""
        return int(_U64.unpack_from(self._map, _GAUGE_OFFSET + which * 8)[0])

    def words(self) -> tuple[int, ...]:
        """Return all header words at once, the magic first: `words()[Word.PID]`."""
        return _WORDS.unpack_from(self._map, 0)

    def gauges(self) -> dict[str, int]:
        """Return all published figures by their names in lower case."""
        return dict(zip(_GAUGE_NAMES, _GAUGES.unpack_from(self._map, _GAUGE_OFFSET), strict=True))

    def record(self, seq: int) -> Record | None:
        """Return record `seq`, or None if it is torn, overwritten or not yet written."""
        if not seq > 0:
            return None
        offset = HEADER_BYTES + (seq - 1) % self._capacity * 64
        first = Record._make(RECORD.unpack_from(self._map, offset))
        again = _U64.unpack_from(self._map, offset)[0]
        return first if first.seq == seq == again else None

    def latest(self, count: int) -> list[Record]:
        """Return up to `count` newest whole records, oldest first."""
        return self.since(max(0, self.word(Word.HEAD) - count))

    def since(self, seq: int) -> list[Record]:
        """Return the whole records above `seq` that the ring still holds, oldest first."""
        return list(map(Record._make, self.rows(seq)))

    def rows(self, seq: int) -> list[Row]:
        """Return what `since` does as plain rows, by one copy."""
        head, capacity = self.word(Word.HEAD), self._capacity
        first = max(seq + 1, head - capacity + 1, 1)
        if first > head:
            return []
        begin, end = (first - 1) % capacity * 64, (head - 1) % capacity * 64 + 64
        body = self._map
        if begin < end:
            data = body[HEADER_BYTES + begin : HEADER_BYTES + end]
        else:
            data = body[HEADER_BYTES + begin : HEADER_BYTES + capacity * 64] + body[HEADER_BYTES : HEADER_BYTES + end]
        # The writer went on meanwhile: what it overwrote, or is overwriting now, is left out.
        lapped = self.word(Word.HEAD) + 1 - capacity
        rows = list(RECORD.iter_unpack(data))
        if first > lapped and rows[-1][0] == head:
            return rows
        return [row for want, row in enumerate(rows, first) if row[0] == want > lapped]

    def close(self) -> None:
        """Unmap."""
        self._map.close()
