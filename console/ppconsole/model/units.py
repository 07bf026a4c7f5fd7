"""Figures as short text of a known width. None is unknown and shows as `?`, never as 0."""

from __future__ import annotations

import time

UNKNOWN = "?"


def wall_text(wall: float, form: str = "%H:%M:%S") -> str:
    """Return a time in Unix seconds as the clock here shows it; `?` for one that no calendar has."""
    try:
        return time.strftime(form, time.localtime(wall))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def bytes_text(count: float | None) -> str:
    """Return bytes in at most 5 characters: `512B`, `57.0M`, `1.5G`, `120G`."""
    if count is None:
        return UNKNOWN
    value = float(count)
    for unit in "BKMGTP":
        if abs(value) < 999.5 or unit == "P":
            break
        value /= 1024
    return f"{value:.0f}{unit}" if unit == "B" or abs(value) >= 99.95 else f"{value:.1f}{unit}"


def count_text(count: float | None) -> str:
    """Return a count in at most 5 characters: `1024`, `18.4k`, `3.2M`."""
    if count is None:
        return UNKNOWN
    value = float(count)
    if abs(value) < 9999.5:
        return f"{value:.0f}"
    for unit in "kMGT":
        value /= 1000
        if abs(value) < 999.5 or unit == "T":
            break
    return f"{value:.0f}{unit}" if abs(value) >= 99.95 else f"{value:.1f}{unit}"


def age_text(seconds: float | None) -> str:
    """Return a duration in at most 4 characters: `0.1s`, `41s`, `1m42`, `17m`, `27h`, `12d`.

    From 10 s on it is rounded down, so that no age is shown before it is reached.
    """
    if seconds is None:
        return UNKNOWN
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f}s"
    whole = max(10, int(seconds))
    minutes, rest = divmod(whole, 60)
    if not minutes:
        return f"{whole}s"
    if minutes < 10:
        return f"{minutes}m{rest:02d}"
    if minutes < 100:
        return f"{minutes}m"
    return f"{minutes // 60}h" if minutes < 6000 else f"{min(minutes // 1440, 999)}d"


def ms_text(milliseconds: float | None) -> str:
    """Return a duration given in milliseconds in at most 5 characters: `0.4ms`, `22ms`, `6.2s`."""
    if milliseconds is None:
        return UNKNOWN
    if milliseconds < 9.95:
        return f"{max(0.0, milliseconds):.1f}ms"
    if milliseconds < 999.5:
        return f"{milliseconds:.0f}ms"
    return age_text(milliseconds / 1000)


def percent_text(fraction: float | None) -> str:
    """Return a fraction in at most 4 characters: `58%`, `100%`."""
    return UNKNOWN if fraction is None else f"{fraction * 100:.0f}%"


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return part / whole; None where either is unknown or the whole is nothing."""
    return part / whole if part is not None and whole else None
