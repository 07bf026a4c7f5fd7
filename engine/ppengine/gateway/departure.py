"""The gateway's last act after the supervisor's death: remove all processes and files of the engine."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from ppengine.protocol import discovery

GRACE_S = 3.0
_AFTER_KILL_S = 2.0


def clear_away(engine: str, processes: dict[int, int], *, keep_files: bool = False) -> list[int]:
    """Wait for `processes` (pid to start time), kill those that stay, remove the engine's files.

    `keep_files`: another supervisor needs them. Returns the killed pids. A pid that another process has taken over is
    left alone.
    """
    _wait(processes, GRACE_S)
    killed = []
    for pid in _living(processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    _wait(processes, _AFTER_KILL_S)
    if not keep_files:
        discovery.remove_engine(engine)
    return killed


def _living(processes: dict[int, int]) -> list[int]:
    return [pid for pid, start in processes.items() if discovery.process_start(pid) == start]


def _wait(processes: dict[int, int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _living(processes) and time.monotonic() < deadline:
        time.sleep(0.02)
