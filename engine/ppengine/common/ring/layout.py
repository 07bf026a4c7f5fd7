"""Layout of a ring: the header, the records, and the numbers of phases and figures. Kinds are in the protocol."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"PPRING\x00\x02"
HEADER_BYTES = 4096
RECORD = struct.Struct("<QHhIQQQQIIII")  # 64 bytes: see `Record`
DEFAULT_CAPACITY = 4096
NAME_OFFSET, NAME_BYTES = 1024, 64
GAUGE_OFFSET = 2048
MAP_RING = "map"
"""Name of the ring of the thread that maps and unmaps a GPU's memory; other stages have none."""
DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
"""Element types of messages, in the order of their codes (from 1)."""


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
    GIL_PROBES = 12
    """Looks of the control thread, in its own ring, at whether the GIL is free; waits and holds are parts of them."""
    GIL_WAITS = 13
    """Looks that found it held, however briefly."""
    GIL_HOLDS = 14
    """Waits for a thread that does not let go."""
    GIL_HOLD_NS = 15
    """Sum of these waits."""
    GIL_SLEEP_NS = 16
    """Sum of the sleeps before these looks."""
    GIL_WAIT_NS = 17
    """Sum of the waits, each as long as a turn at most."""
    THREAD_ID = 18
    """The kernel's id of the control thread, in its own ring."""


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
    SWAP_BASE = 14
    SWAP_LENGTH = 15
    COLLECTIVE_WAIT_NS = 16
    """Time so far for which this rank waited for others of its stage."""
    SWAP_SHARED = 17
    """1 if the swap space is shared memory, else 0."""


class Record(NamedTuple):
    """One operation. `done_ns` 0: still open. `peer` -1: none; a stage for receive and send, a rank for collectives.

    For a message, in the rings `send` and `receive`: `size` is its bytes, `detail` its number on the edge (from 1),
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
SEQ, KIND, _, STEP, BEGUN_NS, RETURNED_NS, DONE_NS, SIZE, DETAIL = range(9)
"""Places of the fields of a `Record` in a `Row`."""


def shape_code(dtype: str, width: int) -> int:
    """Return element type and row length of a message in 32 bits; 0 for a type that has no code."""
    return (DTYPES.index(dtype) + 1) << 24 | min(width, 0xFFFFFF) if dtype in DTYPES else 0


def shape_text(size: int, code: int) -> str:
    """Return `float32[7, 64] 1792 B` for `size` bytes of `shape_code` `code`."""
    row = row_bytes(code)
    if row is None:
        return f"{size} B"
    return f"{DTYPES[(code >> 24) - 1]}[{size // row if row else 0}, {code & 0xFFFFFF}] {size} B"


def row_bytes(code: int) -> int | None:
    """Return the bytes of a row of `shape_code` `code`; None for a type that has no code."""
    kind, width = code >> 24, code & 0xFFFFFF
    if not 0 < kind <= len(DTYPES):
        return None
    digits = "".join(filter(str.isdigit, DTYPES[kind - 1]))
    return width * (int(digits) // 8 if digits else 1)


def in_ms(ns: int) -> float:
    """Return nanoseconds as milliseconds, to the hundredth."""
    return ns // 10_000 / 100
