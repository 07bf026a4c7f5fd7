"""The special tokens of a Hugging Face folder, for the tokenizer and the chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppengine.checkpoint.config_json import SETTING_MOST, read_as


def special_tokens(folder: Path) -> dict[str, str]:
    """Return `bos_token`, `eos_token` and the like as texts. Raises ConfigError."""
    names = "special_tokens_map.json", "tokenizer_config.json"
    return {key: text for name in names for key, text in _texts(read_optional(folder / name)).items()}


def read_optional(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, an empty one if there is no such file. Raises ConfigError."""
    if not path.is_file():
        return {}
    found: dict[str, Any] = read_as(path, dict[str, Any], SETTING_MOST)
    return found


def _texts(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens of one file; they are written as texts or as objects with `content`."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found
