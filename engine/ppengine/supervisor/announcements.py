"""Lines of the supervisor: JSON on stdout for programs, one line on stderr for a human."""

from __future__ import annotations

import contextlib
import json
import sys

from ppengine.protocol.error_text import LINE_MOST, one_line


def announce(event: str, **fields: object) -> None:
    """Write one machine-readable line to stdout, if anyone still reads it."""
    with contextlib.suppress(OSError):
        print(json.dumps({"event": event, **fields}), flush=True)


def tell(text: str) -> None:
    """Write one printable line for a human to stderr, if anyone still reads it."""
    with contextlib.suppress(OSError):
        print(one_line(text, LINE_MOST), file=sys.stderr, flush=True)
