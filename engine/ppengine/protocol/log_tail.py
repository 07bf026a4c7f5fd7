"""Newest lines of the processes' log files, each tagged with its process."""

from __future__ import annotations

import os
import re
from pathlib import Path

LINES_MOST = 10_000
_LINE_BYTES = 400
"""Bytes read per requested line: more than an average line has."""
_FILE_MOST = 1024 * 1024
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.]\d+)?")


def tail(run_dir: Path, lines: int, stage: int | None = None) -> list[str]:
    """Return up to `lines` last lines of every log in `run_dir` (or only `stage`'s), as `stage0| text`, by time.

    A line without a date (a traceback) stays behind the one before it.
    """
    lines = max(0, min(lines, LINES_MOST))
    pattern = "*.log" if stage is None else f"stage{stage}.log"
    found: list[tuple[str, str]] = []
    for path in sorted(run_dir.glob(pattern)):
        when = ""
        for line in last_lines(path, lines):
            stamp = _STAMP.match(line)
            when = stamp.group() if stamp else when
            found.append((when, f"{path.stem}| {line}"))
    return [line for _, line in sorted(found, key=lambda dated: dated[0])]


def last_lines(path: Path, lines: int) -> list[str]:
    """Return up to `lines` last lines of a file, from its last MiB; none if it is not readable."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - min(_FILE_MOST, (lines + 1) * _LINE_BYTES)))
            cut = file.tell() > 0
            text = file.read(_FILE_MOST).decode("utf-8", "replace")
    except OSError:
        return []
    split = text.splitlines()
    # The first one may be half a line.
    split = split[1:] if cut and len(split) > lines else split
    return split[-lines:] if lines else []
