"""Newest lines of the processes' log files, each tagged with its process."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import BinaryIO

LINES_MOST = 10_000
_LINE_BYTES = 400
"""Bytes read per requested line: more than an average line has."""
_FILE_MOST = 1024 * 1024
_SEARCHED_BYTES = 64 * 1024
"""Bytes that the search for a time reads line by line."""
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.]\d+)?")


def tail(run_dir: Path, lines: int, stage: int | None = None, until: float = float("inf")) -> list[str]:
    """Return up to `lines` last lines of every log in `run_dir` (or only `stage`'s), as `stage0| text`, by time.

    A line without a date (a traceback) stays behind the one before it. `until`: lines after this time (Unix seconds)
    are left out.
    """
    lines = max(0, min(lines, LINES_MOST))
    pattern = "*.log" if stage is None else f"stage{stage}.*log"
    found: list[tuple[str, str]] = []
    for path in sorted(run_dir.glob(pattern)):
        when = ""
        for line in last_lines(path, lines, until):
            stamp = _STAMP.match(line)
            when = stamp.group() if stamp else when
            found.append((when, f"{path.stem}| {line}"))
    return [line for _, line in sorted(found, key=lambda dated: dated[0])]


def last_lines(path: Path, lines: int, until: float = float("inf")) -> list[str]:
    """Return up to `lines` last lines of a file, from a MiB at most; none if it is not readable.

    With `until` (Unix seconds), those before the first line with a later date.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            if until != float("inf"):
                end = _end_at(file, end, _stamp_of(until))
            begin = file.seek(max(0, end - min(_FILE_MOST, (lines + 1) * _LINE_BYTES)))
            text = file.read(end - begin).decode("utf-8", "replace")
    except OSError:
        return []
    split = text.splitlines()
    # The first one may be half a line.
    split = split[1:] if begin > 0 and len(split) > lines else split
    return split[-lines:] if lines else []


def _stamp_of(wall: float) -> str:
    """Return a time in Unix seconds as log lines have it."""
    whole = int(wall)
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(whole))}.{int((wall - whole) * 1000):03d}"


def _end_at(file: BinaryIO, size: int, last: str) -> int:
    """Return the byte at which the first line with a date after `last` begins; `size` if there is none."""
    low, high = 0, size
    while high - low > _SEARCHED_BYTES:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()  # the rest of a line
        place, stamp = _next_stamp(file, high)
        if stamp and stamp <= last:
            low = place
        else:
            high = middle
    file.seek(low)
    while True:
        place, stamp = _next_stamp(file, size)
        if not stamp or stamp > last:
            return place


def _next_stamp(file: BinaryIO, end: int) -> tuple[int, str]:
    """Return the next line with a date, before `end`: its place and its date; an empty date if there is none."""
    while (place := file.tell()) < end and (line := file.readline()):
        if stamp := _STAMP.match(line[:32].decode("ascii", "replace")):
            return place, stamp.group()
    return end, ""
