"""The recorder's ring: a small mmapped file that one thread writes and any process reads, without locks.

File: one header page, then `capacity` records of 64 bytes. The writer fills a record and then its `seq`
(commit last); the reader takes a record only if `seq` is the one that belongs there, before and after it read.
An operation is one record written twice, begun (`done_ns` 0) and ended, or once if it has ended by then. So the open
operation of a thread is visible from outside, even if its process is stopped or holds the GIL. A message between
stages is a record on each side, with its number on that edge: both sides together locate it.

All times are CLOCK_MONOTONIC nanoseconds, which on Linux is one clock for all processes of a host.
"""

from ppengine.common.ring.layout import (
    BEGUN_NS,
    DETAIL,
    DONE_NS,
    DTYPES,
    HEADER_BYTES,
    KIND,
    MAP_RING,
    RETURNED_NS,
    SEQ,
    SIZE,
    STEP,
    Gauge,
    Phase,
    Record,
    Row,
    Word,
    in_ms,
    row_bytes,
    shape_code,
    shape_text,
)
from ppengine.common.ring.reader import RingReader
from ppengine.common.ring.writer import RingWriter
from ppengine.protocol.operation_kinds import WAITS, Kind

__all__ = [
    "BEGUN_NS", "DETAIL", "DONE_NS", "DTYPES", "HEADER_BYTES", "KIND", "MAP_RING", "RETURNED_NS", "SEQ", "SIZE", "STEP",
    "WAITS",
    "Gauge", "Kind", "Phase", "Record", "RingReader", "RingWriter", "Row", "Word", "in_ms", "row_bytes", "shape_code",
    "shape_text",
]  # fmt: skip
