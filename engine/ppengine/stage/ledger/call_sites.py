"""Call sites as two machine words; file, line and function are looked up when a finding is read."""

from __future__ import annotations

import sys
from pathlib import PurePath
from types import CodeType

CallSite = tuple[CodeType, int]
"""Code object and offset of the instruction in it."""


def here(depth: int) -> CallSite:
    """Return the site `depth` frames above the caller (0: the caller itself)."""
    frame = sys._getframe(depth + 1)
    return frame.f_code, frame.f_lasti


def site_text(site: CallSite) -> str:
    """Return `stage/transport.py:158 put`: file with its folder, line, function."""
    code, offset = site
    line = next(
        (number for start, end, number in code.co_lines() if start <= offset < end and number is not None),
        code.co_firstlineno,
    )
    return f"{'/'.join(PurePath(code.co_filename).parts[-2:])}:{line} {code.co_name}"


def site_key(site: CallSite) -> tuple[int, int]:
    """Return the identity of a site; comparing code objects themselves compares all their bytes."""
    return id(site[0]), site[1]
