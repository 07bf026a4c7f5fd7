"""The text of a checkpoint's chat template: read here, run in the process `templates` alone."""

from __future__ import annotations

from pathlib import Path

from ppengine.checkpoint.config_json import read_bytes
from ppengine.checkpoint.special_tokens import read_optional
from ppengine.common.config import ConfigError
from ppengine.common.one_line import one_line

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of templates; the second one is that of chats with tools, where a checkpoint has it."""


def template_source(folder: Path, name: str = DEFAULT) -> str | None:
    """Return a template: a file of its own (transformers 5), or a key of tokenizer_config.json, maybe by name.

    None: there is none of that name. Raises ConfigError in one line.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _text(file if name == DEFAULT else folder / "additional_chat_templates" / f"{name}.jinja")
    template = read_optional(folder / "tokenizer_config.json").get("chat_template")
    if not isinstance(template, list):
        return template if isinstance(template, str) and name == DEFAULT else None
    named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    found = named.get(name)
    return found if isinstance(found, str) else None


def _text(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(one_line(f"{path}: {error}")) from None
