"""The operator's file `$XDG_CONFIG_HOME/ppconsole/config.toml`, checked; nothing in it is guessed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from ppengine.protocol.error_text import one_line, shown
from ppengine.protocol.keys import config_dir

from ppconsole.model.thresholds import METRICS, AlarmConfig, OnIncident, Threshold, problem_of

_BYTES_MOST = 256 * 1024
_STEP = re.compile(r"\.([\w-]+)|\[(\d+)\]")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


class ConfigFileError(Exception):
    """A file that is not in effect. One line: file, key, value and what would be right."""


def config_path() -> Path:
    """Return the place of the file, `~/.config` where the variable is not set."""
    return config_dir() / "config.toml"


def read_config(path: Path) -> AlarmConfig:
    """Return the content of the file; without a file, nothing is configured. Raises ConfigFileError."""
    try:
        with path.open("rb") as file:
            text = file.read(_BYTES_MOST + 1)
        if len(text) > _BYTES_MOST:
            raise ConfigFileError(f"{path} has more than {_BYTES_MOST} bytes, the most that is read")
        data = tomllib.loads(text.decode())
    except FileNotFoundError:
        return AlarmConfig()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, RecursionError) as error:  # ValueError: a number of too many digits, beside tomllib's own
        raise ConfigFileError(f"{path} is not TOML: {one_line(str(error))}") from None
    try:
        config = msgspec.convert(data, AlarmConfig)
    except msgspec.ValidationError as error:
        raise ConfigFileError(f"{path}: {_explained(str(error), data)}") from None
    for index, threshold in enumerate(config.thresholds):
        if (problem := problem_of(threshold)) is not None:
            key, right = problem
            raise ConfigFileError(f"{path}: thresholds[{index}].{key} is {shown(getattr(threshold, key))}: {right}")
        _check_command(path, f"thresholds[{index}].command", threshold.command)
    if config.on_incident is not None:
        _check_command(path, "on_incident.command", config.on_incident.command)
    return config


def _check_command(path: Path, key: str, command: list[str]) -> None:
    if command and (not command[0] or any("\0" in word for word in command)):
        raise ConfigFileError(
            f'{path}: {key} is {shown(command)}: it must be a program and its arguments, ["logger", "x"]'
        )


def _explained(text: str, data: Any) -> str:
    """Return msgspec's words about a value with the value's key and what would be right."""
    reason, _, place = text.partition(" - at `$")
    steps = [(name, int(number or 0)) for name, number in _STEP.findall(place)]
    value = data
    for name, number in steps:
        value = value[name] if name else value[number]
    key = place.rstrip("`").lstrip(".")
    if unknown := _UNKNOWN.search(reason):
        first = steps[0][0] if steps else ""
        kind = {"thresholds": Threshold, "on_incident": OnIncident}.get(first, AlarmConfig)
        name = one_line(f"{key}.{unknown[1]}".lstrip("."), 80)
        return f"{name} is {shown(value[unknown[1]])}: no such key; the keys are {', '.join(kind.__struct_fields__)}"
    if key.endswith(".metric"):
        return f"{key} is {shown(value)}: it must be one of {', '.join(METRICS)}"
    return f"{key or 'the file'} is {shown(value)}: {reason[:1].lower()}{reason[1:]}"
