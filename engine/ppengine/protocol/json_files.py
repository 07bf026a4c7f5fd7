"""Read JSON that another process, another version or another person has written."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from ppengine.protocol.error_text import one_line

BYTES_MOST = 16 * 1024 * 1024
"""Bytes of one file: as many as a message has."""
T = TypeVar("T")


def decode_json(data: bytes, kind: type[T]) -> T:
    """Return `data` decoded as `kind`. Raises ValueError, in one line, for anything else.

    Whole numbers have 64 bits at most, as in messages: arithmetic with longer ones would raise an error later.
    """
    try:
        value = msgspec.json.decode(data, type=kind)
        msgspec.msgpack.encode(value)
    except OverflowError:
        raise ValueError("a whole number in it has more than 64 bits") from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(one_line(str(error))) from None
    return value


def read_json_file(path: Path, kind: type[T]) -> T:
    """Return the content of a file, decoded as `kind`. Raises OSError, and ValueError for a content that cannot be."""
    with path.open("rb") as file:
        data = file.read(BYTES_MOST + 1)
    if len(data) > BYTES_MOST:
        raise ValueError(f"more than {BYTES_MOST} bytes, the most that is read")
    return decode_json(data, kind)
