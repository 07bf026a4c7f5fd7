"""The main screen as rows: the left and the right column, from one state and one frame."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from ppengine.protocol.inspection import BlocksDetail
from ppengine.protocol.snapshot import RequestInfo

from ppconsole.model.ranks import place_of, several
from ppconsole.model.request_fields import FIELDS
from ppconsole.model.state import ConsoleState, Output
from ppconsole.view import events, kvmap, request_table, stage_rows, stage_table, timeline
from ppconsole.view.cells import EMPTY, Row, clip, column_at, place, row
from ppconsole.view.frame import Frame
from ppconsole.view.marks import faulty_places
from ppconsole.view.stage_rows import NONE_OPENED, RowKey, StageRow

_HOST_FROM = 6
"""Least rows of the KV map with the host's slots below it."""


class Picked(NamedTuple):
    """The selection of the operator."""

    request: str | None = None
    stage: RowKey | None = None
    stages_focused: bool = False
    followed: str | None = None
    top: int = 0
    """First visible position of the request table."""
    marked: tuple[str, ...] = ()
    opened: Set[int] = NONE_OPENED
    """Stages with a row a rank."""


def output_status(output: Output | None) -> str:
    """Return the progress of a followed output."""
    if output is None:
        return "waiting for its first token"
    if output.finished:
        return f"done ({output.finish_reason or 'finished'}), {output.tokens} tokens"
    return f"{output.tokens} tokens"


def left(
    state: ConsoleState, frame: Frame, arranged: Sequence[RequestInfo], picked: Picked, trends: Sequence[Row] = ()
) -> list[Row]:
    """Return stage rows, pool line, requests, trends, event tail and output, each in the height that `frame` gives.

    `trends`: the rows of that panel.
    """
    snapshot = state.snapshot
    if snapshot is None:
        return [EMPTY, row(("  waiting for the engine; the console stays until it answers", "dim"))]
    stage = picked.stage if picked.stages_focused else None
    request = None if picked.stages_focused else picked.request
    lines = stage_table.rows(snapshot, frame.left, frame.stages, stage, picked.opened) if frame.stages else []
    lines.append(request_table.pool(snapshot, frame.left))
    if frame.requests:
        table = request_table.rows(
            state, arranged, frame.left, request, picked.top, frame.requests, frame.why_least, frozenset(picked.marked)
        )
        lines += _exactly(table, frame.requests + 1)
    lines += _exactly(list(trends), frame.trends)
    if frame.events:
        lines += _exactly(events.tail(state.events, frame.left, frame.events, state.level), frame.events)
    if frame.output:
        output = state.outputs.get(picked.followed) if picked.followed else None
        lines += events.output(picked.followed, output, output_status(output), frame.left, frame.output)
    return lines


def _exactly(lines: list[Row], height: int) -> list[Row]:
    """Return `lines` cut or filled to `height`."""
    return lines[:height] + [EMPTY] * (height - len(lines))


class Spot(NamedTuple):
    """The thing at a row and column of the left part: a stage, a request, or a column title that sorts."""

    stage: RowKey | None = None
    request: str | None = None
    sort: str | None = None


def spot(
    state: ConsoleState, frame: Frame, arranged: Sequence[RequestInfo], top: int, x: int, y: int,
    opened: Set[int] = NONE_OPENED,
) -> Spot:  # fmt: skip
    """Return the thing at cell `x` of row `y`. `top`: first visible position of the request table."""
    if state.snapshot is None:
        return Spot()
    title = 1  # below the pool line
    if frame.stages:
        stages, rest = stage_rows.fold(state.snapshot, frame.stages, opened)
        if 1 <= y <= len(stages):
            return Spot(stage=stages[y - 1].key)
        title += 1 + len(stages) + bool(rest)  # header, rows, the folded rest
    if frame.requests and y == title:
        key = column_at(place(request_table.columns(frame.left, frame.why_least), frame.left), x)
        return Spot(sort=key if key in FIELDS else None)
    at = top + y - title - 1
    inside = y > title and y <= title + frame.requests
    return Spot(request=arranged[at].id) if inside and at < len(arranged) else Spot()


def shown_stages(state: ConsoleState, frame: Frame, opened: Set[int]) -> list[StageRow]:
    """Return the rows of stages that are shown."""
    return stage_rows.fold(state.snapshot, frame.stages, opened)[0] if state.snapshot and frame.stages else []


class Beside(NamedTuple):
    """The right column, and how many cells its KV map can have."""

    rows: list[Row]
    cells: int


def right(
    state: ConsoleState, frame: Frame, height: int, blocks: BlocksDetail | None, picked: Picked
) -> Beside:  # fmt: skip
    """Return timeline, KV map and (very wide) the selected stage's streams, in at most `height` rows."""
    snapshot, width = state.snapshot, frame.side
    if snapshot is None or not width:
        return Beside([], 0)
    shown = stage_rows.fold(snapshot, max(1, frame.lanes or frame.stages), picked.opened)[0]
    lines = (
        [*timeline.rows(snapshot, shown, width, state.span_ms), timeline.legend(width, several(snapshot))]
        if frame.lanes
        else []
    )
    stage = next((each for each in shown if each.key == picked.stage), shown[0] if shown else None)
    tail = events.streams(stage.info, width, several(snapshot)) if stage is not None else []
    room = height - len(lines)
    reserved = len(tail) if frame.streams and room > 14 else 0
    host = kvmap.host_rows(snapshot.tiers, width) if room - reserved >= _HOST_FROM else []
    map_room = room - reserved - len(host)
    if frame.kv_map:
        pool = next((each.kv_blocks for each in snapshot.stages if each.kv_blocks.used is not None), None)
        lines += [*kvmap.rows(blocks, width, map_room, picked.request, pool), *host]
    if len(lines) + len(tail) + 1 > height and not reserved:
        tail = []
    if frame.streams and tail:  # rows that the map does not need have the streams of other stages
        faulty = faulty_places(snapshot)
        others = (one for one in shown if stage is not None and one.key != stage.key)
        for each in sorted(others, key=lambda one: place_of(one.info) not in faulty):
            more = events.streams(each.info, width, several(snapshot))
            if len(lines) + len(tail) + len(more) <= height:
                tail += more
    lines += [EMPTY] * (height - len(lines) - len(tail))
    cells = kvmap.room(width, map_room) if frame.kv_map else 0
    return Beside([clip(line, width) for line in (*lines, *tail)], cells)
