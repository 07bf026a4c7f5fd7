"""Whether a value is of the kind and in the range that a field wants, and in words what would be right."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any

import msgspec

from ppengine.protocol.error_text import shown

_ONE = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_MANY = {int: "whole numbers", float: "numbers", str: "texts", list[int]: "lists of whole numbers"}


def check_kind(name: str, value: object, kind: Any) -> None:
    """Raise ValueError, with the name, the value and what would be right, unless `value` is of the type `kind`.

    The limits of a `kind` with `msgspec.Meta` are checked, too.
    """
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError):
        wanted = range_text(kind) if _fits(value, _bare(kind)) else ""
        raise ValueError(f"{name} is {shown(value)}; it must be {wanted or words_for(kind)}") from None


def range_text(kind: Any) -> str:
    """Return the limits of a type in words, as `1 to 64`; empty if it has none."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(filter(None, map(range_text, inner)), "")
    if typing.get_origin(kind) is not Annotated:
        return ""
    meta = next(each for each in inner if isinstance(each, msgspec.Meta))
    if meta.description is not None:
        return meta.description
    if meta.max_length is not None:
        unit = "entries" if typing.get_origin(inner[0]) is list else "characters"
        each = range_text(typing.get_args(inner[0])[0]) if unit == "entries" else ""
        return f"{meta.min_length or 0} to {meta.max_length} {unit}" + (f" of {each}" if each else "")
    if meta.gt is not None:
        return f"above {_number(meta.gt)} and at most {_number(meta.le)}"
    least, most = meta.ge, meta.le
    return f"{_number(least)} to {_number(most)}"


def _number(value: float | None) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _fits(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError):
        return False
    return True


def _bare(kind: Any) -> Any:
    """Return a type without its limits."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _bare(inner[0])
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_bare(each) for each in inner)]  # noqa: UP007 - made of a tuple
    if origin is list:
        return list[_bare(inner[0])]  # type: ignore[misc]  # made at run time
    return kind


def words_for(kind: Any) -> str:
    """Return a type and its limits in words, as `a whole number, 1 to 64`."""
    limits, kind = range_text(kind), _bare(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, inner))}"
    if origin in (typing.Union, types.UnionType):
        words = " or ".join(words_for(each) for each in inner if each is not type(None))
    elif origin is list:
        words = f"a list of {_MANY[inner[0]]}"
    elif origin is dict:
        words = f"a map from {_MANY[inner[0]]} to {_MANY[inner[1]]}"
    else:
        words = _ONE[kind]
    return f"{words}, {limits}" if limits else words
