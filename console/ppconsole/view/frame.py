"""How the rows and columns of the terminal are shared out. Pure arithmetic, so that no row is wasted by accident."""

from __future__ import annotations

from typing import NamedTuple

MIN_WIDTH, MIN_HEIGHT = 60, 16
WIDE = 120
"""From this width on there is a right column with timeline and KV map."""
VERY_WIDE = 150
"""From this width on the right column also has the selected stage's streams."""

_FIXED = 7
"""Banner, verdict, stage header, pool line, request header, prompt, key line."""


class Frame(NamedTuple):
    """Sizes of the main screen's parts in cells. `side` 0: no right column."""

    left: int
    side: int
    stages: int
    requests: int
    events: int
    output: int
    streams: bool


def frame(width: int, height: int, stages: int, output_wanted: bool, requests: int = 1000) -> Frame:
    """Return the sizes for a terminal of `width` x `height`. `stages` and `requests` count the rows wanted."""
    side = 0
    if width >= WIDE:
        side = max(38, min(100, (width - 82) if width < VERY_WIDE else round(width * 0.42)))
    tall = 8 if height < 45 else 16
    shown = max(1, min(stages, tall, max(2, height - _FIXED - 7)))
    room = height - _FIXED - shown
    events = max(1, min(8, room // 6))
    output = max(1, min(10, room // 5 if output_wanted else 1))
    table = max(1, room - events - output)
    # Rows that the table does not need go to the output and the events, in steps so that the lines keep still.
    spare = max(0, table - max(4, -(-requests // 4) * 4))
    more = spare // 2 if output_wanted else 0
    output, events, table = output + more, events + spare - more, table - spare
    return Frame(width - side - (1 if side else 0), side, shown, table, events, output, width >= VERY_WIDE)
