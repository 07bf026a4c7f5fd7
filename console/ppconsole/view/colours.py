"""The meaning of each colour, under the name that it has in a theme. `?` and `ppconsole help columns` show this."""

from __future__ import annotations

from ppconsole.view.legend import Section

_MEANINGS = {
    "ok": "works: computes, runs, done, memory in use",
    "warn": "worth a look: waits, blocked, starved, old, the selected request's blocks",
    "bad": "a fault: dead, halted, the root of a fault, above the limit",
    "info": "on its way: receiving, transmitting, loading, held; free or shared blocks",
    "swap": "moves: swapping, swapped out, resizing",
    "accent": "keys, labels and marks of the selection",
    "key": "keys and labels",
    "dim": "less important, or nothing; a whole grey row or screen is old",
}
"""Meaning by the name of the style."""
_DARK = {
    "ok": "green", "warn": "amber", "bad": "red", "info": "blue", "swap": "violet", "accent": "cyan", "dim": "grey",
}  # fmt: skip
_TERMINAL = _DARK | {"warn": "yellow", "swap": "magenta", "dim": "dim"}
NAMES = {
    "pp-dark": _DARK, "pp-light": _DARK | {"warn": "brown", "accent": "teal"}, "ansi-dark": _TERMINAL,
    "ansi-light": _TERMINAL, "mono": {"bad": "bold", "key": "bold", "dim": "dim"},
}  # fmt: skip
"""Names of the colours by theme. Without colours, letters and words carry the other meanings."""
THEMES = {"pp-dark": "dark", "pp-light": "light", "ansi-dark": "terminal", "ansi-light": "terminal", "mono": "none"}
"""Themes as `PPCONSOLE_THEME` names them; `none`: NO_COLOR is set."""


def section(theme: str) -> Section:
    """Return the colours of `theme`; two meanings of one look share a row."""
    names = NAMES.get(theme, _TERMINAL)
    rows: dict[str, str] = {}
    for style, name in names.items():
        rows[name] = f"{rows[name]}; {_MEANINGS[style]}" if name in rows else _MEANINGS[style]
    styles = {name: style for style, name in reversed(names.items())}
    return Section(f"COLOURS  theme {THEMES.get(theme, theme)}", rows, styles)
