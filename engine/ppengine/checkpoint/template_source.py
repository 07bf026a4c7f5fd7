"""The text of a checkpoint's chat template: read here, run in the process `templates` alone."""

from __future__ import annotations

from pathlib import Path

from ppengine.checkpoint.config_json import read_bytes
from ppengine.checkpoint.special_tokens import read_optional
from ppengine.common.config import ConfigError
from ppengine.common.one_line import one_line


def template_source(folder: Path) -> str | None:
    """Return the template: a file of its own (transformers 5), or a key of tokenizer_config.json, maybe by name.

    None: there is none. Raises ConfigError in one line.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return read_bytes(path).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(one_line(f"{path}: {error}")) from None
    template = read_optional(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
