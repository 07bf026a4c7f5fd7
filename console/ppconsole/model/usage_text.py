"""Errors of a written command as one line: the value, and the values that would be right."""

from __future__ import annotations

import re

import click

_NO_NUMBER = re.compile(r"is not a valid (integer|float)(?: range)?$")
_RANGE = re.compile(r"is not in the range \S+$")


def usage_text(error: click.UsageError) -> str:
    """Return the text of a usage error in one line, without a full stop."""
    text = " ".join(error.format_message().split()).rstrip(".")
    kind = error.param.type if isinstance(error, click.BadParameter) and error.param is not None else None
    bounds = _bounds(kind) if isinstance(kind, click.IntRange | click.FloatRange) else ""
    if bounds:
        text = _RANGE.sub(f"is out of range; it must be {bounds}", text)
    if found := _NO_NUMBER.search(text):
        name = "whole number" if found[1] == "integer" else "number"
        text = f"{text[: found.start()]}is no {name}{f', {bounds}' if bounds else ''}"
    return text


def _bounds(kind: click.IntRange | click.FloatRange) -> str:
    """Return the bounds of a number: `1 to 10000`, `above 0 and at most 1000000`, `0 or more`."""
    low, high = (end if end is None or end % 1 else int(end) for end in (kind.min, kind.max))
    if high is None:
        return f"above {low}" if kind.min_open else f"{low} or more"
    return f"above {low} and at most {high}" if kind.min_open else f"{low} to {high}"
