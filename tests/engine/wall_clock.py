"""A wall clock that can be set, for a process tree: the library `wall_clock.c`, preloaded, and a file with its shift.

libfaketime 0.9.10 cannot do it: with a real monotonic clock, `time.sleep` of Python ends with EINVAL.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
FILE = "PPCONSOLE_TEST_CLOCK"
"""Variable with the path of the file that has the shift, which `WallClock` sets."""
_SHIFT = struct.Struct("q")


class NoWallClockError(Exception):
    """The library cannot be built here. One line."""


class WallClock:
    """The clock of processes that are started with `env`. It jumps for all of them at once."""

    def __init__(self, folder: Path) -> None:
        """Build the library in `folder`. Raises NoWallClockError."""
        compiler, library, self.file = shutil.which("cc"), folder / "wall_clock.so", folder / "shift"
        if compiler is None:
            raise NoWallClockError("no C compiler is here")
        words = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
        ran = subprocess.run(words, capture_output=True, text=True)
        if ran.returncode:
            raise NoWallClockError(ran.stderr.strip().splitlines()[0])
        self.file.write_bytes(_SHIFT.pack(0))
        self.env = {"LD_PRELOAD": str(library), FILE: str(self.file)}

    def set(self, seconds: int) -> None:
        """Let the clock differ from the machine's by that much from now on."""
        shift(self.file, seconds)


def shift(path: Path, seconds: int) -> None:
    """Set the shift in a file that `WallClock` made."""
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, _SHIFT.pack(seconds), 0)
    os.close(descriptor)
