"""The console's own settings, kept from one start to the next in `$XDG_STATE_HOME/ppconsole/console.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from ppengine.protocol.error_text import one_line
from ppengine.protocol.json_files import read_json_file
from ppengine.protocol.kept_files import write_file

from ppconsole.model.prompt_options import OptionError, PromptOptions


class _File(msgspec.Struct):
    """The file's content. Unknown keys are ignored, so that an older version reads a newer file."""

    prompt: dict[str, Any] = {}
    panels: dict[str, bool] = {}
    trends_s: int = 0


class Settings:
    """The settings and their file. `problem`: why the file, or a part of it, is not in effect; empty: it is."""

    def __init__(self, path: Path | None = None) -> None:
        self.prompt = PromptOptions()
        self.panels: Mapping[str, bool] = {}
        """Panels of the main screen that were shown or hidden by a key."""
        self.trends_s = 0
        """Time span of the trends in seconds; 0: none was chosen."""
        self.problem = ""
        self._path = path
        if path is not None:
            self._load(path)

    def set_prompt(self, options: PromptOptions) -> None:
        """Use and keep `options`. Raises OSError if they cannot be kept; they are in effect all the same."""
        self.prompt = options
        self._keep()

    def set_view(self, panels: Mapping[str, bool], trends_s: int) -> None:
        """Use and keep which panels are shown or hidden, and the span of the trends. Raises OSError."""
        self.panels, self.trends_s = dict(panels), trends_s
        self._keep()

    def keep_copy(self, text: str) -> Path | None:
        """Keep the newest text that was copied in `copied.txt`, beside the settings; return its path. Raises OSError.

        None: there are no files.
        """
        if self._path is None:
            return None
        path = self._path.with_name("copied.txt")
        _write(path, text.encode(errors="replace"))
        return path

    def _keep(self) -> None:
        if self._path is not None:
            _write(self._path, msgspec.json.encode(_File(dict(self.prompt.chosen), dict(self.panels), self.trends_s)))

    def _load(self, path: Path) -> None:
        try:
            kept = read_json_file(path, _File)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            self.problem = one_line(f"{path} is not in effect, the defaults are: {why}")
            return
        self.panels, self.trends_s = kept.panels, kept.trends_s
        try:
            self.prompt = _options(kept.prompt)
        except OptionError as error:
            self.problem = one_line(f"{path} is not in effect, the defaults are: {error}")


def settings_path() -> Path:
    """Return the place of the settings: in the XDG state folder, `~/.local/state` if it is not set."""
    base = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(base) if base.startswith("/") else Path("~/.local/state").expanduser()
    return folder / "ppconsole" / "console.json"


def _options(kept: Mapping[str, Any]) -> PromptOptions:
    """Return the options that were kept. Each goes through the same checks as if it were typed."""
    return PromptOptions().changed(*([name, *_words(value)] for name, value in kept.items()))


def _words(value: Any) -> list[str]:
    """Return a kept value as the words after `set NAME`."""
    if isinstance(value, bool):
        return ["on" if value else "off"]
    if isinstance(value, list):
        numbers = bool(value) and all(isinstance(each, int) for each in value)
        return [",".join(map(str, value))] if numbers else [str(each) for each in value]
    return [str(value)]


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_file(path, data)
