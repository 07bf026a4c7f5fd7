"""Read fields of a checkpoint's JSON files, each checked for its kind; an error is one line with the value."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ppengine.common.config import ConfigError

T = TypeVar("T")


class CheckpointError(ConfigError):
    """A checkpoint folder that cannot be used. One line: what, with the value, and what would be right."""


def count(data: dict[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number of at least 1; `default` if it is missing or null."""
    value = data.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be a whole number of at least 1")
    return value


def number(data: dict[str, Any], key: str, default: float) -> float:
    """Return a number of at least 0; `default` if it is missing or null."""
    value = data.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be a number of at least 0")
    return float(value)


def typed(data: dict[str, Any], key: str, kind: type[T], default: T) -> T:
    """Return a value of type `kind`; `default` if it is missing or null."""
    value = data.get(key)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise CheckpointError(f"config.json: {key} is {value!r}; it must be a {kind.__name__}")
    return value


def token_ids(value: Any) -> list[int]:
    """Return ids that are given as nothing, one or a list."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointError(f"config.json: token id is {value!r}; it must be a whole number or a list of them")
    return ids


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    try:
        data = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name}; a model is a Hugging Face folder") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: it must hold a JSON object, this is {type(data).__name__}")
    return data
