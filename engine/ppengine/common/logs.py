"""The log of every engine process: dated lines on stderr, which its parent keeps in `<run folder>/<process>.log`.

Only what an operator wants to read later is written: started, loaded, serving, resized, refused, lost, leaving.
Never something per step or per request.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any

_ROUTINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.]\d{3} (?:INFO|WARNING) ")


class _OneLine(logging.Formatter):
    """A message is one line and moves no cursor, even with names and texts from outside in it.

    The lines of a traceback are indented: texts in an exception can have a line of their own, which must not look like
    one of this log.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return date, level and message."""
        record.message = "".join(c if c.isprintable() else " " for c in record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        """Return the traceback."""
        lines = super().formatException(ei).split("\n")
        return "\n".join("  " + "".join(c if c.isprintable() else " " for c in line) for line in lines)


def is_routine(line: str) -> bool:
    """Return whether a log line is no reason for an end: a note, or a warning of something that went on."""
    return _ROUTINE.match(line) is not None


def start() -> None:
    """Begin the log of this process. Libraries log warnings and errors only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("ppengine").setLevel(logging.INFO)
