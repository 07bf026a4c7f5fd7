"""Lines of the supervisor: JSON on stdout for programs, one line on stderr for a human."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TextIO

from ppengine.protocol.error_text import LINE_MOST, one_line


def announce(event: str, **fields: object) -> None:
    """Write one machine-readable line to stdout, if anyone still reads it."""
    _write(json.dumps({"event": event, **fields}), sys.stdout)


def tell(text: str) -> None:
    """Write one printable line for a human to stderr, if anyone still reads it."""
    _write(one_line(text, LINE_MOST), sys.stderr)


def pass_on(line: bytes) -> None:
    """Write a line of another process to stdout, if anyone still reads it."""
    _write(line.decode(errors="replace").removesuffix("\n"), sys.stdout)


def _write(line: str, stream: TextIO) -> None:
    with contextlib.suppress(OSError):
        try:
            print(line, file=stream, flush=True)
        except BrokenPipeError:
            # Its buffer keeps the line: Python would try again at its end, and exit with 120.
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), stream.fileno())
            stream.flush()
