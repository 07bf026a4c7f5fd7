"""Event tail, output tail and streams: the lower lines of the main screen."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.severity import Level, is_at_least, level_of
from ppengine.protocol.snapshot import Event
from ppengine.protocol.stage_info import StageInfo

from ppconsole.model.folding import counted, folded, gathered
from ppconsole.model.ranks import words
from ppconsole.model.safe import clean
from ppconsole.model.state import Output
from ppconsole.model.units import count_text, wall_text
from ppconsole.view import figures
from ppconsole.view.cells import (
    FLEX,
    Column,
    Row,
    Seg,
    clip,
    fit,
    fitted,
    header,
    place,
    row,
    table_row,
    width_of,
    wrap,
)
from ppconsole.view.marks import Mark
from ppconsole.view.wording import STREAM, with_rank

_WHOLE = 100_000
"""More cells than any event has."""
_LOOKED_AT = 1000
"""Most events that the tail is made of."""
_HEAD_SEGS = 4
"""Time, mark, number and kind, in front of the text of an event in full."""
_LEAST_TEXT, _NARROW_INDENT = 30, 11
LABELS: dict[Level, str] = {"info": "LOG  ", "warning": "WARN ", "error": "ERR  "}
"""Label of the log, by the least level that it shows."""
LEVEL_NOTES: dict[Level, str] = {"info": "", "warning": "W errors alone", "error": "W all events"}
"""The next effect of the key of the level, while not all events are shown."""
NOTHING: dict[Level, str] = {
    "info": "nothing has happened yet", "warning": "no warning and no error", "error": "no error",
}  # fmt: skip
_GOOD = ("applied", "finished", "ready", "serving", "live")


def mark_of(event: Event) -> Mark:
    """Return the mark of an event: a letter for each colour, for terminals without colours."""
    level = level_of(event)
    if level == "info":
        return Mark("●", "ok" if any(word in event.kind for word in _GOOD) else "info")
    return Mark("E", "bad") if level == "error" else Mark("W", "warn")


def event_row(event: Event, width: int, *, full: bool = False) -> Row:
    """Return one event. `full` adds date-free extras: sequence, step."""
    clock = wall_text(event.wall)
    segs: list[Seg] = [(clock + " ", "dim")]
    mark = mark_of(event)
    segs.append((f"{mark.text} ", mark.style))
    if full:
        segs.append((fit(f"#{event.seq}", 8), "dim"))
        segs.append((fit(event.kind, 18) + " ", mark.style))
    if event.by:
        segs.append((clean(event.by) + " ", "strong"))
    text = clean(event.text)
    if event.request and event.request not in text:
        text = f"{clean(event.request)} {text}"
    segs.append((text, ""))
    if full and event.step is not None:
        segs.append((f"  step {event.step}", "dim"))
    return clip(Row(tuple(segs)), width)


def event_rows(event: Event, width: int) -> list[Row]:
    """Return one event in full; a text that does not fit goes on in rows under itself, with less indent if narrow."""
    whole = event_row(event, _WHOLE, full=True)
    head, body = whole.segs[:_HEAD_SEGS], whole.segs[_HEAD_SEGS:]
    used = sum(width_of(text) for text, _ in head)
    if used + sum(width_of(text) for text, _ in body) <= width:
        return [whole]
    indent = used if width - used >= _LEAST_TEXT else _NARROW_INDENT
    first, *more = wrap("".join(text for text, _ in body), width - indent)
    if indent != used:
        return [clip(Row(head), width), *(row((" " * indent, ""), (line, "")) for line in (first, *more))]
    return [Row((*head, (first, ""))), *(row((" " * indent, ""), (line, "")) for line in more)]


def of_level(events: Sequence[Event], level: Level) -> Sequence[Event]:
    """Return the events of a level and above."""
    return events if level == "info" else [event for event in events if is_at_least(event, level)]


def tail(events: Sequence[Event], width: int, height: int, level: Level = "info") -> list[Row]:
    """Return the newest events of a level and above in `height` rows, oldest first; most ends of requests as counts."""
    lines, label = [], LABELS[level]
    recent = gathered(of_level(events, level)[-_LOOKED_AT:])
    newest = counted(recent, height // 4)[-4 * height :]
    for index, event in enumerate(folded(newest)[-height:]):
        body = event_row(event, width - 5)
        lines.append(Row(((label if index == 0 else "     ", "head.word"), *body.segs)))
    if not lines:
        lines.append(row((label, "head.word"), (NOTHING[level], "dim")))
    return lines


def output(request: str | None, known: Output | None, status: str, width: int, height: int) -> list[Row]:
    """Return prompt and answer of the followed request under the label OUT. `status`: running, or how it ended.

    The head has the begin of the prompt, the rows below it the end of the answer.
    """
    if request is None:
        return [row(("OUT  ", "head.word"), ("follows the request that you send; f follows the selected one", "dim"))]
    text, prompt = (known.text, clean(known.prompt.replace("\n", " "))) if known else ("", "")
    head: list[Seg] = [("OUT  ", "head.word"), (f"{clean(request)} ", "strong"), (f"{clean(status)} ", "dim")]
    # A tail needs no more text than it can show.
    last = text[-width * (height + 1) :]
    if height == 1:
        flat = clean(last.replace("\n", " "))
        room = max(8, width - sum(width_of(part) for part, _ in head))
        shown = flat if len(flat) <= room else "…" + flat[-(room - 1) :]
        return [clip(Row((*head, (shown, "out"))), width)]
    asked = [("› ", "accent"), (prompt, "")] if prompt else []
    lines = [
        Row((*head, *asked)),
        *(row(("     ", ""), (line, "out")) for line in wrap(last, width - 6)[-(height - 1) :]),
    ]
    return [clip(line, width) for line in lines]


STREAM_COLUMNS = (
    Column("name", STREAM["name"], 8, 0),
    Column("owner", STREAM["owner"], 8, 3),
    Column("op", STREAM["op"], 20, 1, grow=FLEX),
    Column("age", STREAM["age"], 5, 2, ">"),
    Column("pending", STREAM["pending"], 4, 4, ">"),
    Column("waits", STREAM["waits"], 9, 5, grow=10),
)


def streams(stage: StageInfo, width: int, ranked: bool = False) -> list[Row]:
    """Return the streams of a stage with operation, age, pending operations and wait. `ranked`: it has ranks."""
    names = {"name": [each.name for each in stage.streams], "owner": [each.owner for each in stage.streams]}
    placed = place(fitted(STREAM_COLUMNS, names), width - 1)
    name = words(stage.index, stage.tensor_rank if ranked else None).upper()
    lines = [row((fit(f" {name} STREAMS", width), ""), fill="head")]
    titles = header(placed, fill="")
    lines.append(Row(((" ", ""), *((text, "dim") for text, _ in titles.segs))))
    for stream in stage.streams:
        old = (stream.age_ms or 0) > 2000
        body = table_row(
            placed,
            {
                "name": (stream.name, "strong"),
                "owner": (stream.owner, "dim"),
                "op": (
                    with_rank(stream.op or "idle", stage),
                    "bad" if old and stream.op else ("" if stream.op else "dim"),
                ),
                "age": (figures.age(stream.age_ms) if stream.op else figures.NOTHING, "warn" if old else "dim"),
                "pending": (count_text(stream.pending), ""),
                "waits": (stream.waits_for or "", "warn"),
            },
        )
        lines.append(Row(((" ", ""), *body.segs)))
    if not stage.streams:
        lines.append(row((fit("  this stage reports no streams", width), "dim")))
    return lines
