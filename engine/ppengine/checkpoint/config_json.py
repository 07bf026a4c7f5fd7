"""Read fields of a checkpoint's JSON files, each checked for its kind and range."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ppengine.common.config import ConfigError
from ppengine.protocol.error_text import one_line, shown

T = TypeVar("T")
_JSON_MOST = 4 * 1024 * 1024
"""Bytes of a config.json; those of real models have at most 100,000."""
SETTING_MOST = 128 * 1024 * 1024
"""Bytes of each other file beside the weights."""
IDS_MOST = 256
"""Token ids of one field."""


class CheckpointError(ConfigError):
    """A checkpoint folder that cannot be used. One line: what, with the value, and what would be right."""


class FieldError(ValueError):
    """A field with a value that cannot be: key, value, and what would be right. `read_spec` adds the file."""


def count(data: dict[str, Any], key: str, most: int, *, least: int = 1, default: int | None = None) -> int:
    """Return a whole number from `least` to `most`; `default` if it is missing or null. Raises FieldError."""
    value = data.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise FieldError(f"{key} is {shown(value)}; it must be a whole number, {least} to {most}")
    return value


def number(data: dict[str, Any], key: str, default: float, most: float, *, least: float = 0) -> float:
    """Return a number from `least` to `most`; `default` if it is missing or null. Raises FieldError."""
    value = data.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise FieldError(f"{key} is {shown(value)}; it must be a number, {least:g} to {most:g}")
    return float(value)


def typed(data: dict[str, Any], key: str, kind: type[T], default: T) -> T:
    """Return a value of type `kind`; `default` if it is missing or null. Raises FieldError."""
    value = data.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise FieldError(f"{key} is {shown(value)}; it must be {_KINDS[kind]}")
    return value


_KINDS: dict[type, str] = {bool: "true or false", str: "a text", list: "a list", dict: "an object"}


def token_ids(data: dict[str, Any], key: str) -> list[int]:
    """Return ids that are given as nothing, one or a list. Raises FieldError."""
    value = data.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if len(ids) > IDS_MOST or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        right = f"a whole number of at least 0, or a list of at most {IDS_MOST}"
        raise FieldError(f"{key}: token id is {shown(value)}; it must be {right}")
    return ids


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError."""
    data = read_as(path, Any, _JSON_MOST)
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: it must hold a JSON object, this is {type(data).__name__}")
    return data


def read_as(path: Path, kind: Any, most: int) -> Any:
    """Return a JSON file of at most `most` bytes, decoded as `kind`. Raises CheckpointError."""
    text = read_bytes(path, most)
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {one_line(str(error))}") from None


def read_bytes(path: Path, most: int = SETTING_MOST) -> bytes:
    """Return a file of at most `most` bytes. A pipe, which would never open, is none. Raises CheckpointError."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CheckpointError(f"{path} is no file")
            text = file.read(most + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name}; a model is a Hugging Face folder") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) > most:
        raise CheckpointError(f"{path}: more than {most} bytes, the most that is read")
    return text
