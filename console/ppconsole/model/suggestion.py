"""The suggestion of a verdict: a verb of the console, a screen of it, or a line for a shell on the engine's host."""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from ppengine.protocol.verb_table import ROWS

from ppconsole.model.safe import clean

_OURS = re.compile(r"ppconsole ([^();]+)")
_SHELL = ("kill -", "echo ", "prlimit ")
_STAGE = re.compile(r"--stage[ =](\d+)")


class Suggestion(NamedTuple):
    """`words`: of `ppconsole`, without the program's name; empty where it is nothing that the console can do."""

    text: str
    words: tuple[str, ...]
    stage: int | None

    @property
    def name(self) -> str:
        """The command's name, of some two words; empty without one."""
        two = " ".join(self.words[:2])
        return two if any(row.words == two for row in ROWS.values()) else self.words[0] if self.words else ""

    @property
    def is_shell(self) -> bool:
        """Whether it is a line for a shell, though none of ours."""
        return not self.words and self.text.startswith(_SHELL)


def suggestion(text: str) -> Suggestion:
    """Return what `suggest` of a verdict asks for. Nothing in it can be more than the words of one command."""
    text = clean(text)
    match = _OURS.search(text)
    try:
        words = tuple(shlex.split(match[1])) if match else ()
    except ValueError:
        words = ()
    if words[:1] in (("-e",), ("--engine",)):
        words = words[2:]
    stage = _STAGE.search(match[1]) if match else None
    return Suggestion(text, words, int(stage[1]) if stage else None)
