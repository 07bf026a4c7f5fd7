"""Micro-batch timeline: one row a stage, x is time, now at the right. Bubbles and a stuck stage are visible at once."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.snapshot import Snapshot, StageInfo

from ppconsole.view.cells import Row, clip, fit, row, runs
from ppconsole.view.marks import faulty_stages

IDLE = "·"
_FORWARD, _EMBED, _HEAD, _SAMPLE, _ON_DEVICE = 3, 2, 4, 5, 17
KINDS: dict[int, tuple[str, str]] = {
    1: ("<", "gantt.wait"), 6: (">", "gantt.send"), 7: ("o", "gantt.swap"), 8: ("n", "gantt.swap"),
    9: ("x", "gantt.swap"), 10: ("z", "gantt.swap"), 11: ("c", "gantt.send"), 13: ("t", "gantt.wait"),
    14: ("L", "gantt.swap"), 16: (">", "gantt.wait"),
    _EMBED: ("e", "gantt.work"), _HEAD: ("h", "gantt.work"), _SAMPLE: ("s", "gantt.work"),
}  # fmt: skip
LEGEND = "0-9 micro-batch <recv >send o swap ·idle"
# A device works beside its host: what that does is painted over it, where it does not merely wait.
_RANK = {
    _FORWARD: 6, _EMBED: 5, _HEAD: 5, _SAMPLE: 5, 7: 4, 8: 4, 9: 4, 10: 4, 6: 3, 11: 3, 14: 3, 16: 3, _ON_DEVICE: 2,
    1: 1, 13: 1,
}  # fmt: skip


def span_ms(stages: Sequence[StageInfo]) -> float:
    """Return the time that the timeline covers: the span of the stages' reports, at least 50 ms, in round steps."""
    oldest = max((entry[2] for stage in stages for entry in stage.timeline if len(entry) == 4), default=0.0)
    for step in (50, 75, 100, 150, 200, 300, 400, 500, 750, 1000, 1500, 2000, 3000, 5000, 10_000, 30_000):
        if oldest <= step:
            return float(step)
    return 60_000.0


def lane(entries: Sequence[Sequence[float]], span: float, width: int) -> list[tuple[str, str]]:
    """Return one (glyph, style) a cell. If several operations share a cell, computing wins over waiting."""
    cells = [(IDLE, "gantt.idle")] * width
    ranks = [0] * width
    for entry in entries:
        if len(entry) != 4:
            continue
        kind, micro = int(entry[0]), int(entry[1])
        rank = _RANK.get(kind, 0)
        if rank == 0:
            continue
        glyph = (str(micro % 10), f"gantt.{micro % 2}") if kind in (_FORWARD, _ON_DEVICE) else KINDS[kind]
        first = int((span - entry[2]) / span * width)
        last = max(first, int((span - entry[2] + entry[3]) / span * width - 1e-9))
        for index in range(max(0, first), min(width, last + 1)):
            if rank > ranks[index]:
                cells[index], ranks[index] = glyph, rank
    return cells


def rows(snapshot: Snapshot, stages: Sequence[StageInfo], width: int, title: str = "TIMELINE") -> list[Row]:
    """Return a header with the time span and one lane a stage."""
    span = span_ms(stages)
    head = f" {title}  last {f'{span:g} ms' if span < 1000 else f'{span / 1000:g} s'}"
    lines = [Row(((fit(head, width - 5), ""), (" now ", "dim")), "head")]
    faulty = faulty_stages(snapshot)
    for stage in stages:
        style = "bad" if stage.index in faulty else "dim"
        cells = lane(stage.timeline, span, max(1, width - 4))
        lines.append(Row(((f"{stage.index:>3} ", style), *runs(cells))))
    return lines


def legend(width: int) -> Row:
    """Return the meanings of the glyphs."""
    return clip(row((" " + LEGEND, "dim")), width)
