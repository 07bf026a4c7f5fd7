"""Keys of the main screen. Ids are stable, so that a keymap can change them."""

from __future__ import annotations

from textual.binding import Binding, BindingType

from ppconsole.screens.line_screen import SCALE_KEYS, SCREEN_KEYS, SORT_KEY, line_key, verb_keys
from ppconsole.view.panels import PANELS, RESET_KEY, key_of

MAIN: list[BindingType] = [
    *verb_keys("request", "memory", "engine", "stage", "check"),
    *SCALE_KEYS, *SCREEN_KEYS,
    Binding("up,k", "move(-1)", "up", show=False), Binding("down,j", "move(1)", "down", show=False),
    Binding("pageup", "page(-1)", "page up", show=False), Binding("pagedown", "page(1)", "page down", show=False),
    Binding("g,home", "move(-100000)", "first", show=False), Binding("G,end", "move(100000)", "last", show=False),
    Binding("tab,shift+tab", "swap_focus", "stages or requests", show=False),
    Binding("enter", "drill", "show in detail", show=False),
    Binding("u", "ranks", "ranks of a stage", show=False),
    Binding("W", "level", "log: warnings, errors, or all", show=False),
    Binding("question_mark", "look('help')", "help", show=False),
    *(Binding(key_of(panel), f"panel({key_of(panel)})", f"{panel}: show or hide", show=False) for panel in PANELS),
    Binding("t", "span", "time span of the trends", show=False),
    Binding(RESET_KEY, "panel(0)", "panels by need", show=False),
    line_key("i", "prompt"), line_key("slash", "filter"), line_key("colon", "command"),
    Binding("escape", "clear", "clear the filter or the marks, or leave the past", show=False),
    SORT_KEY, Binding("R", "reverse", "reverse", show=False),
    Binding("space", "mark", "mark or unmark", show=False),
    Binding("asterisk", "mark_all", "mark all shown, or none", show=False),
    Binding("f", "follow", "follow output", show=False), Binding("F", "freeze", "freeze", show=False),
    Binding("y", "copy_cli", "copy the CLI line", show=False),
    Binding("Y", "copy_answer", "copy the answer", show=False), Binding("q", "app.quit", "quit", show=False),
]  # fmt: skip
