"""The C code of events: its structures, and how a process gets it."""

from __future__ import annotations

import ctypes
import logging
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger("ppengine.http")

SOURCE = Path(__file__).with_name("event_rows.c")
COMPILERS = ("cc", "gcc", "clang")
_COMPILER_S = 20
_GROUPS_MOST = 64


TEXT = struct.Struct("@PII")
"""Text of a token: the address and size of its JSON, with quotes, and its length in characters."""
ROW = struct.Struct("@dPPIIIIii")
"""A stream: the fields of `row` in `event_rows.c`."""


def address_of(data: bytes) -> int:
    """Return the address of bytes, for as long as they are kept."""
    found = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
    assert found is not None, "bytes are somewhere"
    return found


class Group(ctypes.Structure):
    """Tokens of a client whose tokens before came at the same time."""

    _fields_ = (("at", ctypes.c_double), ("client", ctypes.c_int32), ("count", ctypes.c_uint32))


class Message(ctypes.Structure):
    """Tokens of a message of the core, in columns."""

    _fields_ = (
        ("rows", ctypes.c_void_p), ("offsets", ctypes.c_void_p), ("tokens", ctypes.c_void_p),
        ("count", ctypes.c_uint32), ("now", ctypes.c_double),
    )  # fmt: skip


class Result(ctypes.Structure):
    """Tokens that were not sent, and counts of those that were."""

    _fields_ = (
        ("left_count", ctypes.c_uint32), ("unknown_count", ctypes.c_uint32), ("group_count", ctypes.c_uint32),
        ("sent", ctypes.c_uint32), ("left", ctypes.c_void_p), ("unknown", ctypes.c_void_p),
        ("groups", Group * _GROUPS_MOST),
    )  # fmt: skip


def load(folder: Path) -> ctypes.PyDLL | None:
    """Compile the code in `folder` and load it. Without it, which the log explains, events cost more.

    No file stays. Each process compiles its own in 0.1 s: a cache would be a file that another user may have written.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        log.info("no C compiler (%s) is on the PATH: streams cost more CPU", ", ".join(COMPILERS))
        return None
    with tempfile.TemporaryDirectory(prefix="events-", dir=folder) as made:
        target = f"{made}/events.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", target, str(SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_COMPILER_S, check=False)
            if done.returncode:
                raise OSError(done.stderr.decode(errors="replace").strip()[-300:] or f"exit code {done.returncode}")
            # It keeps Python's lock: a send takes some µs, and to wait for the lock takes up to 5 ms.
            library = ctypes.PyDLL(target)
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("%s made no code for events, so streams cost more CPU: %s", compiler, error)
            return None
    library.send_events.restype = ctypes.c_uint32
    library.send_events.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p
    ]  # fmt: skip
    return library
