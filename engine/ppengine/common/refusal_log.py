"""Log lines about peers that are refused: one a second at most, so that a stranger cannot fill the disk."""

from __future__ import annotations

import logging
import time

LOG_S = 1.0
"""Least seconds between two lines."""


class RefusalLog:
    """Writes a line, and how many were left out since the one before. Two threads may use it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._left_out, self._due = 0, 0.0

    def __call__(self, text: str) -> None:
        """Write a line, or count it."""
        now = time.monotonic()
        if now < self._due:
            self._left_out += 1
            return
        more = f", and {self._left_out} others" if self._left_out else ""
        self._left_out, self._due = 0, now + LOG_S
        self._log.warning("%s%s", text, more)
