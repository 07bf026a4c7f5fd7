"""The level of an event, as logs and screens have it, from its kind."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Literal

from ppengine.protocol.snapshot import Event

Level = Literal["error", "warning", "info"]
LEVELS: tuple[Level, ...] = ("info", "warning", "error")
"""From the least."""

_ERRORS = ("dead", "failed", "fault", "killed", "lost", "error", "mismatch", "crashed", "non_finite", "stream_order",
           "stream_owner")  # fmt: skip
_WARNINGS = (
    "refused",
    "stopped",
    "stalled",
    "restart",
    "degraded",
    "ended",
    "gap",
    "new-epoch",
    "superseded",
    "abort",
    "lease.takeover",
    "alarm.raised",
)
_RAISED = "verdict.raised"
_WARNED = ("starved", "blocked", "undetermined", "straggler")
"""Causes of verdicts that warn; the others are errors."""
_ROUTINE = "request.finished"


def is_routine(event: Event) -> bool:
    """Return whether an event is the end of a request: under load there are hundreds a second."""
    return event.kind == _ROUTINE


def log_level(event: Event) -> int:
    """Return the level of an event in Python's logging."""
    return {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}[level_of(event)]


def level_of(event: Event) -> Level:
    """Return the level of an event, by its kind; of a raised verdict, by its cause."""
    if event.kind == _RAISED:
        return "warning" if event.text.startswith(_WARNED) else "error"
    return _of_kind(event.kind)


def is_at_least(event: Event, level: Level) -> bool:
    """Return whether an event has a level or one above it."""
    return level == "info" or LEVELS.index(level_of(event)) >= LEVELS.index(level)


@lru_cache(maxsize=512)
def _of_kind(kind: str) -> Level:
    if any(word in kind for word in _ERRORS):
        return "error"
    return "warning" if any(word in kind for word in _WARNINGS) else "info"
