"""Whether a value is of the kind that a field wants, and in words what would be right."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec

_ONE = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_MANY = {int: "whole numbers", float: "numbers", str: "texts"}
_SHOWN = 80
"""Characters of a value that an error repeats."""


def check_kind(name: str, value: object, kind: Any) -> None:
    """Raise ValueError, with the name, the value and what would be right, unless `value` is of the type `kind`."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ValueError(f"{name} is {repr(value)[:_SHOWN]}; it must be {_words(kind)}") from None


def _words(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(each) for each in inner if each is not type(None))
    if origin is list:
        return f"a list of {_MANY[inner[0]]}"
    return _ONE[kind]
