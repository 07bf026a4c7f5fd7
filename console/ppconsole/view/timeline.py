"""Micro-batch timeline: one row a stage, x is time, now at the right. Bubbles and a stuck stage are visible at once."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.operation_kinds import RANK_WAITS, Kind
from ppengine.protocol.snapshot import Snapshot

from ppconsole.model.ranks import place_of
from ppconsole.model.state import SPAN_MS
from ppconsole.view.cells import Row, fit, row, runs, width_of
from ppconsole.view.marks import faulty_places
from ppconsole.view.stage_rows import StageRow, name_width

IDLE = "·"
KINDS: dict[int, tuple[str, str]] = {
    Kind.SEND: (">", "gantt.send"), Kind.COLLECTIVE: ("c", "gantt.send"),
    Kind.RECEIVE: ("<", "gantt.wait"), Kind.TOKEN_RETURN: ("t", "gantt.wait"), Kind.ROOM: (">", "gantt.wait"),
    Kind.SWAP_OUT: ("o", "gantt.swap"), Kind.SWAP_IN: ("n", "gantt.swap"), Kind.COPY: ("x", "gantt.swap"),
    Kind.MAP: ("z", "gantt.swap"), Kind.LOAD: ("L", "gantt.swap"),
    Kind.EMBED: ("e", "gantt.work"), Kind.HEAD: ("h", "gantt.work"), Kind.SAMPLE: ("s", "gantt.work"),
    **dict.fromkeys(RANK_WAITS, ("r", "gantt.wait")),
}  # fmt: skip
UNKNOWN = " "
"""Before the oldest operation that is kept."""
LEGEND = ("0-9 micro-batch", "<wait", ">send", "·idle", "o n swap out, in", "e h s embed, head, sample")
KEYS = "z Z"
# A device works beside its host: what that does is painted over it, where it does not merely wait.
_RANK: dict[int, int] = {
    Kind.FORWARD: 6,
    **dict.fromkeys((Kind.EMBED, Kind.HEAD, Kind.SAMPLE), 5),
    **dict.fromkeys((Kind.SWAP_OUT, Kind.SWAP_IN, Kind.COPY, Kind.MAP), 4),
    **dict.fromkeys((Kind.SEND, Kind.COLLECTIVE, Kind.LOAD, Kind.ROOM), 3),
    **dict.fromkeys((Kind.ON_DEVICE, *RANK_WAITS), 2),
    **dict.fromkeys((Kind.RECEIVE, Kind.TOKEN_RETURN), 1),
}
_LONG = 7
"""Waits for other ranks are inside the layers: one that fills a cell is painted over them, a shorter one below them."""


def lane(entries: Sequence[Sequence[float]], span: float, width: int) -> list[tuple[str, str]]:
    """Return one (glyph, style) a cell. If several operations share a cell, computing wins over waiting.

    `span`: milliseconds that the cells cover; those before the oldest entry are empty.
    """
    oldest = max((entry[2] for entry in entries if len(entry) == 4), default=0.0)
    known = width - min(width, int((span - min(oldest, span)) / span * width))
    cells = [(UNKNOWN, "gantt.idle")] * (width - known) + [(IDLE, "gantt.idle")] * known
    ranks = [0] * width
    for entry in entries:
        if len(entry) != 4:
            continue
        kind, micro = int(entry[0]), int(entry[1])
        rank = _RANK.get(kind, 0)
        if rank == 0:
            continue
        if kind in RANK_WAITS and entry[3] >= span / width:
            rank = _LONG
        glyph = (str(micro % 10), f"gantt.{micro % 2}") if kind in (Kind.FORWARD, Kind.ON_DEVICE) else KINDS[kind]
        first = int((span - entry[2]) / span * width)
        last = max(first, int((span - entry[2] + entry[3]) / span * width - 1e-9))
        for index in range(max(0, first), min(width, last + 1)):
            if rank > ranks[index]:
                cells[index], ranks[index] = glyph, rank
    return cells


def rows(snapshot: Snapshot, stages: Sequence[StageRow], width: int, span: float = SPAN_MS) -> list[Row]:
    """Return a header with the scale and its keys, and one lane a row of the stage table.

    `span`: milliseconds that a lane covers.
    """
    label = max(3, name_width(snapshot))
    cells = max(1, width - label - 1)
    head = f" TIMELINE  last {f'{span:g} ms' if span < 1000 else f'{span / 1000:g} s'}"
    more = f", {span / cells:.3g} ms a cell  {KEYS} zoom"
    room = width - 5
    lines = [Row(((fit(head + more if len(head + more) <= room else head, room), ""), (" now ", "dim")), "head")]
    faulty = faulty_places(snapshot)
    for stage in stages:
        style = "bad" if place_of(stage.info) in faulty else "dim"
        lines.append(Row(((f"{stage.name:>{label}} ", style), *runs(lane(stage.info.timeline, span, cells)))))
    return lines


def legend(width: int, ranked: bool = False) -> Row:
    """Return the meanings of the glyphs, as many as fit; `?` has all. `ranked`: stages have several ranks."""
    text = ""
    for part in (*LEGEND[:2], *(("r wait for ranks",) if ranked else ()), *LEGEND[2:]):
        if width_of(f"{text} {part}") <= width:
            text += f" {part}"
    return row((text, "dim"))
