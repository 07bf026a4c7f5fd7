"""Checks of the sections of a profile: unknown and missing keys, kinds and ranges of values."""

from __future__ import annotations

import difflib
import functools
import typing
from typing import Any

import msgspec

from ppengine.protocol.error_text import one_line, shown
from ppengine.protocol.frames import check_utf8
from ppengine.protocol.kinds import check_kind, words_for

_KEY_MOST = 80
"""Characters of a key that an error repeats."""


def check_ranges(section: msgspec.Struct, prefix: str) -> None:
    """Raise ValueError for a value out of its range, in `section` or below it."""
    for key, hint in hints_of(type(section)).items():
        value = getattr(section, key)
        if isinstance(value, msgspec.Struct):
            check_ranges(value, f"{prefix}{key}.")
        elif entry_type(hint) is None:
            _check_value(f"{prefix}{key}", value, hint)


def _check_value(name: str, value: object, hint: Any) -> None:
    check_kind(name, value, hint)
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str):
            check_utf8(name, text)
            if "\0" in text:
                raise ValueError(f"{name} is {shown(text)}; it must be a text without NUL")


@functools.cache
def hints_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the types of a section's keys, with their limits."""
    return typing.get_type_hints(kind, include_extras=True)


def entry_type(hint: Any) -> type[msgspec.Struct] | None:
    """Return the section type of a map from names to sections; None for any other type."""
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is not dict or not (isinstance(inner[1], type) and issubclass(inner[1], msgspec.Struct)):
        return None
    return inner[1]


def check_keys(data: dict[str, Any], kind: type[msgspec.Struct], prefix: str) -> None:
    """Raise ValueError for an unknown key, and for a value of another kind or out of its range."""
    hints = hints_of(kind)
    for key, value in data.items():
        if key not in hints:
            near = difflib.get_close_matches(key[:_KEY_MOST], hints, n=1) or _below(key, hints)
            help_text = f"did you mean {prefix}{' or '.join(near)}?" if near else f"the keys are {', '.join(hints)}"
            raise ValueError(f"unknown key {one_line(prefix + key, _KEY_MOST)}; {help_text}")
        section = hints[key]
        if isinstance(section, type) and issubclass(section, msgspec.Struct):
            if not isinstance(value, dict):
                raise ValueError(f"{prefix}{key} is {shown(value)}; it is a section of keys")
            check_keys(value, section, f"{prefix}{key}.")
        elif (entry := entry_type(section)) is not None:
            _check_entries(value, entry, f"{prefix}{key}")
        else:
            _check_value(f"{prefix}{key}", value, section)


def _below(key: str, hints: dict[str, Any]) -> list[str]:
    """Return the places of `key` in the sections of `hints`."""
    sections = {name: hint for name, hint in hints.items() if isinstance(hint, type)}
    return [
        f"{name}.{key}"
        for name, section in sections.items()
        if issubclass(section, msgspec.Struct) and key in hints_of(section)
    ]


def _check_entries(value: object, entry: type[msgspec.Struct], name: str) -> None:
    """Raise ValueError for a map of sections that cannot be."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {shown(value)}; it is a map from names to sections")
    for key, section in value.items():
        if not isinstance(key, str):
            raise ValueError(f"{name} has the name {shown(key)}; it must be a text")
        if not isinstance(section, dict):
            raise ValueError(f"{name}.{one_line(key, _KEY_MOST)} is {shown(section)}; it is a section of keys")
        check_keys(section, entry, f"{name}.{one_line(key, _KEY_MOST)}.")


def check_missing(data: dict[str, Any], kind: type[msgspec.Struct], prefix: str) -> None:
    """Raise ValueError for a required key that is not there."""
    for field in msgspec.structs.fields(kind):
        hint = hints_of(kind)[field.name]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            check_missing(data.get(field.name, {}), hint, f"{prefix}{field.name}.")
        elif (entry := entry_type(hint)) is not None:
            for key, section in data.get(field.name, {}).items():
                check_missing(section, entry, f"{prefix}{field.name}.{one_line(key, _KEY_MOST)}.")
        elif field.required and field.name not in data:
            raise ValueError(f"{prefix}{field.name} is missing; it must be {words_for(hint)}")
