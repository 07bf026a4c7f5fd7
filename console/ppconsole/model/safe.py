"""The one door for text from outside (prompts, outputs, names, errors) on its way to a terminal."""

from __future__ import annotations

import re
import unicodedata

_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC, DCS, SOS, PM, APC with what they carry
    r"|\x9b[0-?]*[ -/]*[@-~]"  # CSI as one C1 character
    r"|\x1b[ -/]*[0-~]"  # two-character escapes
)
_JOINERS = "\u200c\u200d"  # Persian, Indic scripts and emoji need them, and they move nothing
_DROPPED = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def clean(text: str, *, newlines: bool = False) -> str:
    """Return `text` without control characters, escape sequences, bidirectional overrides and invisible marks.

    Line ends and tabs become spaces, or stay with `newlines` (carriage returns never do). The result moves no cursor
    and reorders nothing. It may hold square brackets: show it as text, never parse it as markup.
    """
    if text.isprintable():
        return text
    text = _SEQUENCE.sub("", text).replace("\r\n", "\n")
    return "".join(_kept(character, newlines) for character in text)


def _kept(character: str, newlines: bool) -> str:
    if character in "\n\t":
        return character if newlines else " "
    if character in "\r\v\f\x85\u2028\u2029":
        return "\n" if newlines else " "
    if character.isprintable() or character in _JOINERS:
        return character
    return "" if unicodedata.category(character) in _DROPPED else character
