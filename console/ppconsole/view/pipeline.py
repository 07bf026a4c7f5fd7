"""The pipeline as a picture: stages side by side, waits as arrows, the root with a double frame.

A stage of several ranks is one box, with the state of its worst rank and a letter for each.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import groupby

from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.stage_info import StageInfo

from ppconsole.model.facts import root_verdict
from ppconsole.model.ranks import place_of, several
from ppconsole.model.ranks import words as name_of
from ppconsole.model.units import age_text
from ppconsole.model.waits import CORE, Arrow, arrows
from ppconsole.view import figures, wording
from ppconsole.view.cells import Row, Seg, clip, fit, row, width_of, wrap
from ppconsole.view.marks import CORDONED, faulty_places, faulty_stages, stage_mark, state_word
from ppconsole.view.stage_rows import HALTED, NONE_OPENED, StageRow, rows_of_ranks
from ppconsole.view.stage_rows import rows as all_rows

LEAST, MOST, GAP = 15, 26, 3
"""Widths of a box and of the space between two."""
_THIN, _DOUBLE = "┌─┐│└┘", "╔═╗║╚╝"


def rows(snapshot: Snapshot, width: int) -> list[Row]:
    """Return the boxes of the stages, then in words the long waits that no arrow between neighbours can show."""
    stages = all_rows(snapshot, NONE_OPENED, faulty_places(snapshot))
    if not stages:
        return [row(("  no stage is known yet", "dim"))]
    root = root_verdict(snapshot)
    roots = faulty_stages(snapshot)
    known = arrows(snapshot.waits)
    across = max(1, (width - 1) // (LEAST + GAP))
    shown, left_out = _window(stages, across, roots)
    per_line = -(-len(shown) // -(-len(shown) // across))
    # The last stage of all has nothing behind it.
    free = width - 1 + (GAP if per_line == len(stages) else 0)
    box = min(MOST, free // per_line - GAP)
    found: list[Row] = []
    for start in range(0, len(shown), per_line):
        found += _line(shown[start : start + per_line], snapshot, roots, known, box, len(stages))
    for word, names in left_out:
        found.append(clip(row((f"  {names} ", "dim"), (f"{word}", ""), (" (not drawn)", "dim")), width))
    found += words([arrow for arrow in known if not between_neighbours(arrow)], width, 3)
    if root is not None and root.stage is None and root.cause == "core":
        found.append(row((fit("  ! ROOT: the engine core", width), "bad")))
    return [clip(line, width) for line in found]


def between_neighbours(arrow: Arrow) -> bool:
    """Return whether the picture has an arrow for this wait."""
    return abs(arrow.waiter - arrow.on) == 1 and CORE not in (arrow.waiter, arrow.on)


def _window(
    stages: list[StageRow], across: int, roots: set[int]
) -> tuple[list[StageRow], list[tuple[str, str]]]:  # fmt: skip
    """Return the stages to draw, two lines of them at most around the root, and words for the others."""
    if len(stages) <= 2 * across:
        return stages, []
    middle = min(roots, default=0)
    first = max(0, min(middle - across // 2, len(stages) - across))
    drawn = stages[first : first + across]
    rest = stages[:first] + stages[first + across :]
    words = []
    for state, group in groupby(rest, key=lambda stage: stage.info.state):
        numbers = [stage.key.stage for stage in group]
        name = f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {numbers[0]}-{numbers[-1]}"
        words.append((state, name))
    return drawn, words


def _line(
    stages: Sequence[StageRow], snapshot: Snapshot, roots: set[int], known: list[Arrow], box: int, count: int
) -> list[Row]:
    """Return one line of boxes with the arrows between them."""
    lines: list[list[Seg]] = [[(" ", "")] for _ in range(6 if several(snapshot) else 5)]
    for stage in stages:
        index = stage.key.stage
        parts = _box(stage, snapshot, index in roots, box)
        end = index == count - 1
        glyph = _arrow(index, index + 1, known)
        for number, (line, part) in enumerate(zip(lines, parts, strict=True)):
            line += part
            if end:
                continue
            gap = fit(glyph, GAP) if number == 2 else " " * GAP
            line.append((gap, "warn" if number == 2 else ""))
    return [Row(tuple(line)) for line in lines]


def _arrow(left: int, right: int, known: list[Arrow]) -> str:
    """Return the arrow between two neighbours: it points from the waiting stage to the one it waits for."""
    ahead = any(arrow.waiter == left and arrow.on == right for arrow in known)
    back = any(arrow.waiter == right and arrow.on == left for arrow in known)
    return "◄─►" if ahead and back else "──►" if ahead else "◄──" if back else " · "


def _box(shown: StageRow, snapshot: Snapshot, is_root: bool, width: int) -> list[list[Seg]]:
    """Return the five lines of a box, and one more with its ranks.

    Without colour the root has a double frame and the word ROOT.
    """
    stage, faulty = shown.info, faulty_places(snapshot)
    frame = _DOUBLE if is_root else _THIN
    mark = stage_mark(stage, faulty)
    edge = "bad" if is_root else "dim"
    title = f" {stage.index}{CORDONED if stage.cordon else ''} {'ROOT ' if is_root else ''}"
    inner = width - 2
    old = (stage.sample_age_ms or 0.0) > 2000
    word = state_word(stage.state, mark)
    if several(snapshot) and (place_of(stage) in faulty or stage.state in HALTED):
        named = f"{word}, rank {stage.tensor_rank}"
        word = named if len(named) + len(mark.text) < inner - 1 else word
    body: list[tuple[str, str, str]] = [
        (mark.text, f" {word}{' ~' if old else ''}", mark.style),
        ("", wording.with_rank(stage.op or "", stage) or _last(stage), "strong" if is_root else ""),
        ("", _age(stage), "dim"),
    ]
    lines: list[list[Seg]] = [
        [(frame[0] + frame[1], edge), (title, "bad" if is_root else "strong"),
         (frame[1] * max(0, inner - 1 - len(title)) + frame[2], edge)],
    ]  # fmt: skip
    for letter, text, style in body:
        room = inner - len(letter) - 1
        lines.append([(f"{frame[3]} ", edge), (letter, style), (fit(text, room), style), (frame[3], edge)])
    if several(snapshot):
        lines.append([(f"{frame[3]} ", edge), *_ranks(snapshot, stage.index, faulty, inner - 1), (frame[3], edge)])
    lines.append([(frame[4] + frame[1] * inner + frame[5], edge)])
    return lines


def _ranks(snapshot: Snapshot, stage: int, faulty: Set[Place], room: int) -> list[Seg]:
    """Return the letter of each rank, behind its number if there is room: `0S 1D`."""
    found = [(each.key.rank, stage_mark(each.info, faulty)) for each in rows_of_ranks(snapshot, stage)]
    long: list[Seg] = [(f"{rank}{mark.text} ", mark.style) for rank, mark in found]
    segs = long if sum(len(text) for text, _ in long) <= room else [(mark.text, mark.style) for _, mark in found]
    line = clip(Row(tuple(segs)), room).segs
    return [*line, (" " * (room - sum(width_of(text) for text, _ in line)), "")]


def _last(stage: StageInfo) -> str:
    return "" if stage.state == "dead" else "no open operation"


def _age(stage: StageInfo) -> str:
    """Return the age of its wait, of its open operation, or of its last progress."""
    main = next((stream for stream in stage.streams if stream.op), None)
    if stage.waiting_on is not None:
        return f"for {figures.age(stage.waiting_on.since_ms)}"
    if stage.op and main is not None and main.age_ms is not None:
        return f"for {figures.age(main.age_ms)}"
    age = stage.progress_age_ms
    return "last move unknown" if age is None else f"moved {figures.age(age)} ago"


def words(known: Sequence[Arrow], width: int, most: int) -> list[Row]:
    """Return waits in words, the longest first; those of a healthy pipeline are too short to list."""
    listed = sorted((arrow for arrow in known if arrow.since_s >= 0.5), key=lambda arrow: -arrow.since_s)
    found = []
    for arrow in listed[:most]:
        via = "the link to " if arrow.link else ""
        waiter, on = _name(arrow.waiter, arrow.waiter_rank), _name(arrow.on, arrow.on_rank)
        text = f"{waiter} waits for {via}{on}: {arrow.what}"
        age = f"  {age_text(arrow.since_s):>4}   "
        found += [
            row(((age if not index else " " * 9), "dim"), (part, ""))
            for index, part in enumerate(wrap(text, max(20, width - 9)))
        ]
    if len(listed) > most:
        found.append(row((f"       {len(listed) - most} more waits", "dim")))
    return found


def _name(number: int, rank: int | None) -> str:
    return "core" if number == CORE else name_of(number, rank)
