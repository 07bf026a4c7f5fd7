"""How the rows and columns of the terminal are shared out. Pure arithmetic, so that no row is wasted by accident."""

from __future__ import annotations

from typing import NamedTuple

from ppconsole.view.panels import BY_NEED, Choices, Panel

MIN_WIDTH, MIN_HEIGHT = 60, 16
WIDE = 120
"""From this width on there is a right column with timeline and KV map."""
VERY_WIDE = 150
"""From this width on the right column also has the selected stage's streams."""
_SIDE_LEAST, _WHY_LEAST = 38, 60
_BESIDE_WHY = 44
"""Cells for id, state, output, blocks, age and prompt tokens beside WHY."""
_YIELDED_LEAST = 140
"""From this width on a right column that yields becomes narrow; below, it is hidden."""

_FIXED = 5
"""Banner, verdict, pool line, prompt, key line."""
_BELOW_STAGES = 5
"""Rows that the stages leave at least: three requests, an event, a line of output."""
_TRENDS_FROM, _TRENDS_LEAST = 30, 2
TRENDS_MOST = 9
"""Header and a row for each trend; with more rows the other panels grow."""


class Frame(NamedTuple):
    """Sizes of the main screen's parts in cells; 0: that part is hidden. `side` 0: no right column."""

    left: int
    side: int
    stages: int
    requests: int
    events: int
    output: int
    streams: bool
    trends: int = 0
    lanes: int = 0
    """Stages in the timeline."""
    kv_map: bool = True
    why_least: int = 0
    """Cells that WHY has before columns of less priority; 0: no more than usual."""

    def lowered(self, rows: int) -> Frame:
        """Return the sizes with fewer rows: messages take them from the panels that have most to spare."""
        made = self
        for panel, least in (
            ("output", 1),
            ("events", 1),
            ("trends", 0),
            ("requests", 1),
            ("events", 0),
            ("output", 0),
        ):
            has = getattr(made, panel)
            taken = max(0, min(rows, has - least))
            made, rows = made._replace(**{panel: has - taken}), rows - taken
        return made

    def shows(self, panel: Panel) -> bool:
        """Whether a panel is on the screen."""
        sizes = {
            "stages": self.stages, "requests": self.requests, "timeline": self.side and self.lanes,
            "kv-map": self.side and self.kv_map, "log": self.events, "output": self.output, "trends": self.trends,
        }  # fmt: skip
        return bool(sizes[panel])


def frame(
    width: int, height: int, stages: int, output_wanted: bool, requests: int = 1000, panels: Choices = BY_NEED,
    yields: bool = False,
) -> Frame:  # fmt: skip
    """Return the sizes for a terminal of `width` x `height`. `stages` and `requests` count the rows wanted.

    `yields`: the right column gives its room to the request table; without one, columns of it give theirs to WHY.
    """
    stage_rows, table_rows = panels.get("stages", True), panels.get("requests", True)
    output_wanted = output_wanted and panels.get("output", True)
    fixed = _FIXED + stage_rows + table_rows
    tall = 8 if height < 45 else 16
    lanes = max(1, min(stages, tall, height - fixed - _BELOW_STAGES))
    shown = lanes if stage_rows else 0
    room = height - fixed - shown
    events = max(1, min(8, room // 6)) if panels.get("log", True) else 0
    output = max(1, min(10, room // 5 if output_wanted else 1)) if panels.get("output", True) else 0
    trends = min(_trends(height, panels.get("trends")), room - events - output - table_rows)
    table = room - events - output - trends
    # Rows that the table does not need go to the output and the events, in steps so that the lines keep still.
    spare = max(0, table - (max(4, -(-requests // 4) * 4) if table_rows else 0))
    table -= spare
    if trends:
        alone = not (events or table or output_wanted)
        more = spare if alone else min(spare, TRENDS_MOST - trends)
        trends, spare = trends + more, spare - more
    more = 0 if not output_wanted else spare // 2 if events else spare
    output += more
    if events:
        events += spare - more
    elif not output_wanted and table_rows:
        table += spare
    side = _side(width, panels, yields)
    timeline = lanes if panels.get("timeline", True) else 0
    return Frame(
        width - side - (1 if side else 0), side, shown, table, events, output, width >= VERY_WIDE, trends, timeline,
        panels.get("kv-map", True), _why_least(width - side - (1 if side else 0)) if yields else 0,
    )  # fmt: skip


def _why_least(left: int) -> int:
    """Return the cells of WHY where it is cut: columns of less priority yield, from OWNER on."""
    return max(0, min(_WHY_LEAST, left - _BESIDE_WHY))


def _side(width: int, panels: Choices, yields: bool) -> int:
    """Return the width of the right column; a panel in it that was chosen keeps it."""
    if width < WIDE or not (panels.get("timeline", True) or panels.get("kv-map", True)):
        return 0
    if yields and not (panels.get("timeline") or panels.get("kv-map")):
        return _SIDE_LEAST if width >= _YIELDED_LEAST else 0
    return max(_SIDE_LEAST, min(100, (width - 82) if width < VERY_WIDE else round(width * 0.42)))


def _trends(height: int, chosen: bool | None) -> int:
    """Return the rows of the trends: by need there are some only on a screen that is tall enough."""
    if chosen is False or (chosen is None and height < _TRENDS_FROM):
        return 0
    return max(_TRENDS_LEAST, min(TRENDS_MOST, _TRENDS_LEAST + (height - _TRENDS_FROM) // 3))
