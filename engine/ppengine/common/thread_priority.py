"""The priority of a thread: on Linux each has its own."""

from __future__ import annotations

import contextlib
import os
import threading

NICE = 10
"""Nice value for work that may take seconds: steps of the stages and answers of other threads come first."""


def yield_to_others() -> None:
    """Let the calling thread, and those that it starts, run behind those of usual priority on busy cores."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
