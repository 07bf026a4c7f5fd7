"""The C code of events: its structures, and how a process gets it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import shutil
import signal
import struct
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger("ppengine.http")

SOURCE = Path(__file__).with_name("event_rows.c")
COMPILERS = ("cc", "gcc", "clang")
COMPILER_S = 20.0
"""Seconds for a compiler, which takes 0.1."""
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


async def load(folder: Path) -> ctypes.PyDLL | None:
    """Compile the code in `folder` and load it. Without it, which the log explains, events cost more.

    No file stays. Each process compiles its own in 0.1 s: a cache would be a file that another user may have written.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        log.info("no C compiler (%s) is on the PATH: streams cost more CPU", ", ".join(COMPILERS))
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="events-", dir=folder, ignore_cleanup_errors=True) as made:
            target = f"{made}/events.so"
            options = ["-O2", "-shared", "-fPIC", f"-DGROUPS_MOST={_GROUPS_MOST}"]
            await _run([compiler, *options, "-o", target, str(SOURCE)], Path(made))
            # It keeps Python's lock: a send takes some µs, and to wait for the lock takes up to 5 ms.
            library = ctypes.PyDLL(target)
    except OSError as error:
        log.warning("%s made no code for events, so streams cost more CPU: %s", compiler, error)
        return None
    library.send_events.restype = ctypes.c_uint32
    library.send_events.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p
    ]  # fmt: skip
    return library


async def _run(command: list[str], folder: Path) -> None:
    """Run a compiler. Raises OSError if it fails or is late; then, or if this is cancelled, no process of it stays."""
    with (
        (folder / "errors").open("w+b") as errors,
        # Of asyncio, it would leave the compiler's children if this is cancelled while it starts.
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        ) as process,
    ):
        try:
            async with asyncio.timeout(COMPILER_S):
                code = await asyncio.to_thread(process.wait)
        except TimeoutError:
            raise OSError(f"it took longer than {COMPILER_S} s") from None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # It has ended just now.
                    os.killpg(process.pid, signal.SIGKILL)
        if code:
            errors.seek(0)
            raise OSError(errors.read().decode(errors="replace").strip()[-300:] or f"exit code {code}")
