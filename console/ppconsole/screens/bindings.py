"""Keys of the main screen. Ids are stable, so that a keymap can change them."""

from __future__ import annotations

from ppengine.protocol.verb_table import ROWS
from textual.binding import Binding, BindingType


def _line(key: str, mode: str) -> Binding:
    """Return the binding that opens the line at the bottom.

    With priority: it then has the focus before the next key is looked at. A slow link brings `i` and the first words
    in one packet, and those words must not be taken as verbs.
    """
    return Binding(key, f"line('{mode}')", mode, show=False, priority=True, id=f"line.{mode}")


MAIN: list[BindingType] = [
    *(Binding(row.key.key, f"verb('{row.name}')", row.key.help, show=False, id=f"verb.{row.name}")
      for row in ROWS.values() if row.key is not None),
    Binding("up,k", "move(-1)", "up", show=False), Binding("down,j", "move(1)", "down", show=False),
    Binding("pageup", "page(-1)", "page up", show=False), Binding("pagedown", "page(1)", "page down", show=False),
    Binding("g,home", "move(-100000)", "first", show=False), Binding("G,end", "move(100000)", "last", show=False),
    Binding("tab,shift+tab", "swap_focus", "stages or requests", show=False),
    Binding("enter", "drill", "show in detail", show=False),
    Binding("s", "look('stacks')", "stacks", show=False), Binding("l", "look('logs')", "logs", show=False),
    Binding("e", "look('events')", "events", show=False), Binding("d", "look('diagnosis')", "diagnosis", show=False),
    Binding("v", "look('streams')", "streams", show=False),
    Binding("question_mark", "look('help')", "help", show=False),
    _line("i", "prompt"), _line("slash", "filter"), _line("colon", "command"),
    Binding("S", "sort", "next sort", show=False), Binding("R", "reverse", "reverse", show=False),
    Binding("f", "follow", "follow output", show=False), Binding("space", "freeze", "freeze", show=False),
    Binding("y", "copy_cli", "copy the CLI line", show=False), Binding("q", "app.quit", "quit", show=False),
]  # fmt: skip
