"""The interval between two moments of a past: figures then and now, stages that differ, and the events between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ppengine.protocol.severity import Level
from ppengine.protocol.snapshot import Event, Snapshot
from ppengine.protocol.stage_info import KvBlocks

from ppconsole.model.ranks import of_snapshot
from ppconsole.model.units import UNKNOWN, age_text, count_text, wall_text
from ppconsole.view import events, figures
from ppconsole.view.cells import EMPTY, Row, fit, row

_CELL = 12


class Moment(NamedTuple):
    """A moment of a past: Unix seconds, the picture then, and the events up to it."""

    wall: float
    snapshot: Snapshot | None
    events: Sequence[Event]


def between(one: Moment, other: Moment) -> list[Event]:
    """Return the events after the earlier moment, up to the later one."""
    first, last = sorted((one, other), key=lambda moment: moment.wall)
    return [event for event in last.events if first.wall < event.wall <= last.wall]


def rows(one: Moment, other: Moment, width: int) -> list[Row]:
    """Return the figures of both moments and their differences, then the heading of the events between."""
    first, last = sorted((one, other), key=lambda moment: moment.wall)
    title = f" FROM {wall_text(first.wall)} TO {wall_text(last.wall)}  {age_text(last.wall - first.wall)}"
    found = [row((fit(title, width), ""), fill="head"), _line("", "THEN", "NOW", "CHANGE", "dim")]
    if first.snapshot is None or last.snapshot is None:
        found.append(row(("  no picture of one of the moments was kept", "dim")))
    else:
        then, now = _figures(first.snapshot), _figures(last.snapshot)
        found += [_figure(name, then[name], now[name]) for name in now]
        found += _stages(first.snapshot, last.snapshot, width)
    count = len(between(one, other))
    heading = f" EVENTS BETWEEN  {count}" if count else " EVENTS BETWEEN  none"
    return [*found, EMPTY, row((fit(heading, width), ""), fill="head")]


def _figures(snapshot: Snapshot) -> dict[str, float | None]:
    """Return the figures that are compared."""
    queues, rates = snapshot.queues, snapshot.throughput
    kv = snapshot.stages[0].kv_blocks if snapshot.stages else KvBlocks()
    return {
        "tok/s out": rates.output_tok_s, "tok/s in": rates.prompt_tok_s, "waiting": queues.waiting,
        "running": queues.running, "swapped": queues.swapped, "held": queues.held,
        "kv used": kv.used, "kv mapped": kv.mapped, "util": snapshot.engine.memory_utilization,
        "preemptions": snapshot.preemptions_total, "step": snapshot.engine.step,
    }  # fmt: skip


def _figure(name: str, then: float | None, now: float | None) -> Row:
    """Return one figure at both moments; one that differs is bright."""
    change, style = UNKNOWN, "dim"
    if then is not None and now is not None:
        change = "" if then == now else f"{'+' if now > then else '-'}{_text(name, abs(now - then))}"
        style = "" if change else "dim"
    return _line(name, _text(name, then), _text(name, now), change, style)


def _text(name: str, value: float | None) -> str:
    if value is not None and name == "util":
        return f"{value:.3g}"
    return figures.rate(value) if name.startswith("tok/s") else count_text(value)


def _line(name: str, then: str, now: str, change: str, style: str) -> Row:
    texts = "".join(fit(text, _CELL, ">") for text in (then, now))
    return row((f"  {name:<{_CELL}}", "dim"), (texts, style), (fit(change, _CELL, ">"), "warn"))


def _stages(then: Snapshot, now: Snapshot, width: int) -> list[Row]:
    """Return the stages whose state differs."""
    before = {(stage.index, stage.tensor_rank): stage.state for stage in then.stages}
    return [
        row((fit(f"  stage {of_snapshot(now, stage):<6}{before[key]} > {stage.state}", width), "warn"))
        for stage in now.stages
        if (key := (stage.index, stage.tensor_rank)) in before and before[key] != stage.state
    ]


def event_rows(one: Moment, other: Moment, width: int, level: Level = "info") -> list[list[Row]]:
    """Return the rows of each event between two moments that has a level or one above it."""
    return [events.event_rows(event, width) for event in events.of_level(between(one, other), level)]
