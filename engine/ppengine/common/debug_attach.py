"""Permission to debug our processes: their frames are the best evidence of a hang."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import signal
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PTRACER, _PR_SET_PTRACER_ANY = 0x59616D61, ctypes.c_ulong(-1)


def allow() -> None:
    """Let processes of this user trace this one (py-spy, a debugger), also where Yama reserves that to its parents."""
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


@contextlib.contextmanager
def observed(stack_file: Path) -> Iterator[None]:
    """Let py-spy attach, and SIGUSR2 write the stacks of all threads to a file, while the block lasts."""
    allow()
    with stack_file.open("w") as file:
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR2)


def stack_file(run_dir: str, stage: int | None, rank: int = 0) -> Path:
    """Return where the stacks of a stage, or of the engine core, are written in the run folder."""
    return Path(run_dir) / ("core.stack" if stage is None else f"s{stage}.{rank}.stack")
