"""Trends as rows: a line of bars for each figure, with its newest value and the end of its scale."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ppconsole.model.trends import SPANS_S, TRENDS, Trend, Trends
from ppconsole.model.units import UNKNOWN, age_text, count_text, ms_text
from ppconsole.view import figures
from ppconsole.view.cells import EMPTY, Row, Seg, clip, fit, row

BARS = " ▁▂▃▄▅▆▇█"
"""The first is for a cell without a value; a value of 0 is the second."""
_LABEL, _VALUE, _SCALE = 10, 6, 7


def rows(trends: Trends, span_s: int, width: int, height: int, alarms: Collection[str] = ()) -> list[Row]:
    """Return the trends in exactly `height` rows, with a header from three rows on.

    Figures share the rows: the first ones are shown if there are few, all get taller if there are many.
    `alarms`: metrics past a threshold.
    """
    lines = [_header(span_s, width)] if height > 2 else []
    return [*lines, *_figures(trends, span_s, width, height - len(lines), alarms)]


def _figures(trends: Trends, span_s: int, width: int, room: int, alarms: Collection[str]) -> list[Row]:
    """Return the figures in exactly `room` rows."""
    lines: list[Row] = []
    shown = TRENDS[:room]
    for index, trend in enumerate(shown):
        tall = room // len(shown) + (index < room % len(shown))
        lines += _figure(trends, trend, span_s, width, tall, trend.metric in alarms)
    return [*lines, *[EMPTY] * (room - len(lines))]


def screen(trends: Trends, span_s: int, width: int, height: int, alarms: Collection[str] = ()) -> list[Row]:
    """Return the trends of a screen that has the title itself: the time below them, in exactly `height` rows."""
    return [*_figures(trends, span_s, width, height - 1, alarms), _axis(span_s, width)]


def _axis(span_s: int, width: int) -> Row:
    """Return the times of the left and the right edge of the bars."""
    left, right = f"-{span_text(span_s)}", "now"
    bars = max(len(left) + len(right), width - _LABEL - _VALUE - _SCALE - 2)
    text = f"{' ' * (_LABEL + _VALUE + 1)}{left}{right:>{bars - len(left)}}"
    return clip(row((text, "dim"), (fit("SCALE", _SCALE, ">"), "dim")), width)


def next_span(span_s: int) -> int:
    """Return the span after `span_s`; one that is unknown counts as the first."""
    return SPANS_S[(SPANS_S.index(span_s) + 1) % len(SPANS_S)] if span_s in SPANS_S else SPANS_S[0]


def span_text(span_s: int) -> str:
    """Return a span in words."""
    return f"{span_s // 60} min"


def _header(span_s: int, width: int) -> Row:
    head = fit(f" TRENDS  last {span_text(span_s)}  t changes it", width - _SCALE)
    return Row(((head, ""), (fit("SCALE", _SCALE - 1, ">") + " ", "dim")), "head")


def _figure(trends: Trends, trend: Trend, span_s: int, width: int, tall: int, alarm: bool) -> list[Row]:
    """Return one figure in `tall` rows: label and value at its first one, the scale at both ends."""
    values = trends.series(trend, span_s, max(1, width - _LABEL - _VALUE - _SCALE - 2))
    known = [value for value in values if value is not None]
    top = trend.top if trend.top is not None else max(known, default=0.0)
    newest = trends.newest(trend)
    style = "bad" if alarm else "spark"
    lines = []
    for level, bars in enumerate(columns(values, top, tall)):
        first = level == 0
        mark = "!" if alarm else " "
        label: list[Seg] = [(mark, "bad"), (fit(trend.title if first else "", _LABEL - 1), "" if not alarm else "bad")]
        value = "" if not first else UNKNOWN if newest is None else _number(newest, trend)
        scale = _number(top, trend) if first and known else "0" if level == tall - 1 and tall > 1 else ""
        segs = (*label, (fit(value, _VALUE, ">") + " ", "strong"), (bars, style), (fit(scale, _SCALE, ">"), "dim"))
        lines.append(clip(row(*segs), width))
    return lines


def columns(values: Sequence[float | None], top: float, tall: int) -> list[str]:
    """Return bars from 0 to `top` in `tall` rows, the highest row first; a value that is unknown is blank."""
    steps = len(BARS) - 1
    heights = [None if value is None else _height(value, top, tall * steps) for value in values]
    lines = []
    for level in reversed(range(tall)):
        least = 1 if level == 0 else 0  # a value of 0 is seen as a line at the bottom
        cells = (BARS[0] if each is None else BARS[max(least, min(steps, each - level * steps))] for each in heights)
        lines.append("".join(cells))
    return lines


def _height(value: float, top: float, steps: int) -> int:
    return max(0, min(steps, round(value / top * steps))) if top > 0 else 0


def _number(value: float, trend: Trend) -> str:
    if trend.unit == "s":
        return ms_text(value * 1e3)
    return (count_text(value) if value == int(value) else figures.rate(value)) + trend.unit


def span_line(span_s: int, trends: Trends) -> str:
    """Return the span and how much of it is known."""
    kept = trends.points[-1].wall - trends.points[0].wall if trends.points else 0.0
    return f"last {span_text(span_s)}, {age_text(kept)} known"
