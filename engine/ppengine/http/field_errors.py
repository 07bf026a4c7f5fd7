"""Errors about a value of a body, in words: its field, the value, and the kinds or texts that would be right."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from ppengine.http.api_errors import ApiError, invalid

_SHOWN = 60
"""Most characters of a value that an error repeats."""
_EXPECTED = re.compile(r"Expected `([^`]*)`, got `([^`]*)` - at `\$\.?([^`]*)`")
_KEY = re.compile(r"Expected `([^`]*)`, got `([^`]*)` - at `key` in `\$\.?([^`]*)`")
_ENUM = re.compile(r"Invalid enum value .* - at `\$\.?([^`]*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `([^`]*)`(?: - at `\$\.?([^`]*)`)?")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]*)`")
_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[]+)")
_NAMES = {
    "array": "a list", "bool": "a boolean", "float": "a number", "int": "a whole number", "object": "an object",
    "str": "a text",
}  # fmt: skip
"""Kinds of JSON by the words of msgspec."""
_KINDS = {str: "str", bool: "bool", int: "int", float: "float", list: "array", dict: "object", type(None): "null"}


def json_text(value: object) -> str:
    """Return a value of a body as JSON, cut; lists and objects in words."""
    if isinstance(value, list | dict):
        return _NAMES[_KINDS[type(value)]]
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{msgspec.json.encode(value[:_SHOWN]).decode()[:-1]}..."
    try:
        return msgspec.json.encode(value).decode()[:_SHOWN]
    except (ValueError, OverflowError):
        return "a number of too many digits"


def field_error(error: Exception, data: dict[str, Any], kind: type[msgspec.Struct]) -> ApiError:
    """Return the refusal of `data`, which msgspec could not convert to `kind`."""
    text = str(error)
    if found := _EXPECTED.fullmatch(text):
        place, value = _found(data, found[3], found[2])
        text = f"{place} is {json_text(value)}; it must be {_words(found[1])}"
    elif found := _KEY.fullmatch(text):
        place, value = _found(data, found[3], "")
        wrong = next((key for key in value if not key.lstrip("-").isdigit()), "") if isinstance(value, dict) else ""
        text = f"{place} has the key {json_text(wrong)}; it must be {_words(found[1])}"
    elif found := _ENUM.fullmatch(text):
        place, value = _found(data, found[1], "")
        right = [json_text(one) for one in _literals(kind, found[1])]
        text = f"{place} is {json_text(value)}; it must be {'one of ' * (len(right) > 1)}{', '.join(right)}"
    elif found := _MISSING.fullmatch(text):
        place = f"{found[2]}.{found[1]}" if found[2] else found[1]
        text = f"{place} is missing"
    elif found := _UNKNOWN.fullmatch(text):
        place, names = found[1], kind.__struct_fields__
        near = difflib.get_close_matches(place, names, n=1)
        help_text = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(names)}"
        text = f"unknown field {place}; {help_text}"
    else:
        place = text.partition("`$.")[2].partition("`")[0]
    return invalid(text, re.split(r"[.\[]", place, maxsplit=1)[0] or None)


def _found(data: Any, path: str, kind: str) -> tuple[str, Any]:
    """Return the value at a path of msgspec, and the path. `[...]` is an entry of the `kind`, by any key."""
    place = ""
    for index, name in _STEP.findall(path):
        if index == "...":
            name, data = next(each for each in data.items() if _KINDS[type(each[1])] == kind)
            place = f"{place}[{json_text(name)}]"
        elif index:
            place, data = f"{place}[{index}]", data[int(index)]
        else:
            place, data = f"{place}.{name}" if place else name, data[name]
    return place, data


def _literals(kind: Any, path: str) -> Iterator[Any]:
    """Yield the values that a type takes at a path of msgspec."""
    kinds = [kind]
    for index, name in _STEP.findall(path):
        kinds = [inner for one in kinds for inner in _below(one, name if not index else None)]
    return (
        value for one in kinds for part in _parts(one) if typing.get_origin(part) is Literal for value in part.__args__
    )


def _below(kind: Any, name: str | None) -> Iterator[Any]:
    """Yield the types of a field; without a name, those of entries."""
    for part in _parts(kind):
        if name is None and typing.get_origin(part) in (list, dict):
            yield typing.get_args(part)[-1]
        elif name is not None and isinstance(part, type) and issubclass(part, msgspec.Struct):
            hints = typing.get_type_hints(part)
            names = {field.encode_name: field.name for field in msgspec.structs.fields(part)}
            if name in names:
                yield hints[names[name]]


def _parts(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _words(kinds: str) -> str:
    return " or ".join(_NAMES.get(kind, kind) for kind in kinds.split(" | "))
