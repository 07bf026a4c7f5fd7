"""Calls of backends under way in a store, by which the end of its process is explained."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

NAMED_MOST = 3
"""Calls in one line."""


class BackendCall(msgspec.Struct, frozen=True):
    """A call that had not returned."""

    method: str
    """Method of the backend: `open`, `find`, `read`, `write`, `delete`, `usage`, `close`."""
    backend: str
    """Name of the backend."""


def while_text(calls: Sequence[BackendCall]) -> str:
    """Return ` while write of b1 was under way`; empty without a call."""
    names = sorted({f"{call.method} of {call.backend}" for call in calls})
    if not names:
        return ""
    if len(names) > NAMED_MOST:
        names[NAMED_MOST - 1 :] = [f"{len(names) - NAMED_MOST + 1} others"]
    *others, last = names
    return f" while {', '.join(others)} and {last} were under way" if others else f" while {last} was under way"
