"""Reading a ring, from another process."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from ppengine.common.ring.layout import (
    GAUGE_OFFSET,
    HEADER_BYTES,
    MAGIC,
    NAME_BYTES,
    NAME_OFFSET,
    RECORD,
    Gauge,
    Record,
    Row,
    Word,
)

_U64 = struct.Struct("<Q")
_WORDS = struct.Struct(f"<{len(Word) + 1}Q")
_GAUGE_NAMES = tuple(gauge.name.lower() for gauge in Gauge)
_GAUGES = struct.Struct(f"<{len(Gauge)}Q")


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
        self.name = self._map[NAME_OFFSET : NAME_OFFSET + NAME_BYTES].rstrip(b"\x00").decode("utf-8", "replace")
        self._capacity = self.word(Word.CAPACITY)

    def word(self, which: Word) -> int:
        """Return one header word."""
        return int(_U64.unpack_from(self._map, which * 8)[0])

    def gauge(self, which: Gauge) -> int:
        """Return one published figure."""
        return int(_U64.unpack_from(self._map, GAUGE_OFFSET + which * 8)[0])

    def words(self) -> tuple[int, ...]:
        """Return all header words at once, the magic first: `words()[Word.PID]`."""
        return _WORDS.unpack_from(self._map, 0)

    def gauges(self) -> dict[str, int]:
        """Return all published figures by their names in lower case."""
        return dict(zip(_GAUGE_NAMES, _GAUGES.unpack_from(self._map, GAUGE_OFFSET), strict=True))

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
