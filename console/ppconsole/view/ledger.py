"""The ledger of the stages as rows: streams with their operations, hand-offs, buffers in use."""

from __future__ import annotations

from ppengine.protocol.inspection import LedgerDetail
from ppengine.protocol.reports import LedgerBuffer, StageLedger

from ppconsole.model.ranks import words
from ppconsole.model.safe import clean
from ppconsole.model.units import age_text, bytes_text
from ppconsole.view import figures
from ppconsole.view.cells import FLEX, Cell, Column, Row, clip, fit, header, place, row, table_row
from ppconsole.view.wording import BUFFER, HANDOFF, STREAM

OLD_S, OLD_MS = 3.0, 2000.0
"""A stage reports its ledger once a second: after three missing reports its figures are old. And an old operation."""
MOST_BUFFERS = 8
"""Buffers shown of a stage; `ppconsole streams` prints more."""
_STREAMS = (
    Column("name", STREAM["name"], 12, 0, grow=2),
    Column("owner", STREAM["owner"], 12, 3, grow=2),
    Column("op", STREAM["op"], 14, 1, grow=20),
    Column("age", STREAM["age"], 5, 2, ">"),
    Column("pending", STREAM["pending"], 4, 4, ">"),
    Column("purpose", "FOR", 8, 5, grow=6),
)
_HANDOFFS = (
    Column("producer", HANDOFF["producer"], 18, 0, grow=6),
    Column("consumer", HANDOFF["consumer"], 18, 1, grow=6),
    Column("event", HANDOFF["event"], 12, 2, grow=20),
    Column("count", HANDOFF["count"], 8, 3, ">"),
)
_BUFFERS = (
    Column("name", BUFFER["name"], 16, 0, grow=4),
    Column("generation", BUFFER["generation"], 5, 3, ">"),
    Column("bytes", BUFFER["bytes"], 5, 4, ">"),
    Column("writer", BUFFER["writer"], 26, 1, grow=10),
    Column("readers", BUFFER["readers"], 14, 2, grow=FLEX),
)


def rows(detail: LedgerDetail | None, problem: str, width: int) -> list[Row]:
    """Return the ledger of every stage. `detail` None: not fetched yet, or `problem` says why not."""
    if detail is None or problem:
        return [row((f"  {clean(problem) or 'asking…'}", "bad" if problem else "dim"))]
    if not detail.stages:
        return [row(("  no stage has reported its ledger yet", "dim"))]
    ranked = any(stage.rank for stage in detail.stages)
    return [line for stage in detail.stages for line in _stage(stage, ranked, width)]


def _stage(stage: StageLedger, ranked: bool, width: int) -> list[Row]:
    """Return one stage: how much there is and how old it is, then three tables, each only if it has a row."""
    used = [buffer for buffer in stage.buffers if buffer.in_flight or not buffer.freed]
    used.sort(key=lambda buffer: not buffer.in_flight)
    count = len(stage.findings)
    name = words(stage.stage, stage.rank if ranked else None)
    text = f" {name}  {len(stage.streams)} streams, {len(used)} of {len(stage.buffers)} buffers in use, "
    age = f"  {age_text(stage.age_s)} ago"
    found = f"{count} finding{'' if count == 1 else 's'}"
    head = row((text, "strong"), (found, "bad" if count else "strong"), (age, "warn" if stage.age_s > OLD_S else "dim"))
    lines = [clip(head, width)]
    lines += _table(_STREAMS, [_stream(stage, index) for index in range(len(stage.streams))], width)
    lines += _table(
        _HANDOFFS,
        [{"producer": (hand.producer, ""), "consumer": (hand.consumer, ""), "event": (hand.event, "dim"),
          "count": (str(hand.count), "")} for hand in stage.handoffs],
        width,
    )  # fmt: skip
    lines += _table(_BUFFERS, [_buffer(buffer) for buffer in used[:MOST_BUFFERS]], width)
    if len(used) > MOST_BUFFERS:
        lines.append(row((f"  {len(used) - MOST_BUFFERS} more in use", "dim")))
    return lines


def _table(columns: tuple[Column, ...], cells: list[dict[str, Cell]], width: int) -> list[Row]:
    """Return titles and rows, indented by two; nothing when there is no row."""
    if not cells:
        return []
    placed = place(columns, width - 2)
    titles = row((fit("", 2), ""), *((text, "dim") for text, _ in header(placed).segs))
    return [titles, *(Row((("  ", ""), *table_row(placed, each).segs)) for each in cells)]


def _stream(stage: StageLedger, index: int) -> dict[str, Cell]:
    """Return the cells of one stream. A transfer takes as long as the other stage: only work is marked as too old."""
    stream = stage.streams[index]
    age_ms = None if stream.age_ms is None else stream.age_ms + 1000 * stage.age_s
    old = bool(stream.op) and (age_ms or 0.0) > OLD_MS and stream.purpose == "compute"
    op = stream.op or ("idle" if stream.alive else "destroyed")
    return {
        "name": (stream.name, "strong"),
        "owner": (stream.owner, ""),
        "op": (f"! {op}" if old else op, "bad" if old else "" if stream.op else "dim"),
        "age": (figures.age(age_ms) if stream.op else "-", "warn" if old else "dim"),
        "pending": (str(stream.pending), "warn" if stream.pending > 1 else "dim"),
        "purpose": (f"{stream.purpose} {stream.device}".removesuffix(" cpu"), "dim"),
    }


def _buffer(buffer: LedgerBuffer) -> dict[str, Cell]:
    """Return the cells of one buffer."""
    return {
        "name": (buffer.name, "strong"),
        "generation": (str(buffer.generation), ""),
        "bytes": (bytes_text(buffer.bytes) if buffer.bytes else "-", "dim"),
        "writer": (_by(buffer.writer) or "-", ""),
        "readers": (", ".join(map(_by, buffer.in_flight)) or "-", "warn" if buffer.in_flight else "dim"),
    }


def _by(access: str) -> str:
    """Return `send>2: send of m7` of `send of m7 (stream send>2)`: who it is stays where there is little room."""
    what, _, who = access.removesuffix(")").rpartition(" (")
    return f"{who.removeprefix('stream ').removeprefix('thread ')}: {what}" if what else access
