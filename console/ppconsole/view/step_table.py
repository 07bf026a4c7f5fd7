"""The last steps as a table: a row a step, a column a stage. Letters say how far each stage got, without colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ppengine.protocol.inspection import RingsDetail, StageRings
from ppengine.protocol.place import Place

from ppconsole.model.ranks import short
from ppconsole.model.safe import clean
from ppconsole.model.steps import StageSteps, StepCell, numbers, of_stage, ranks_of
from ppconsole.view import figures
from ppconsole.view.cells import Row, Seg, clip, fit, row
from ppconsole.view.drilldown import heading
from ppconsole.view.wording import fitting_op

_WIDE, _MIDDLE, _NARROW = 24, 16, 8
COUNT = 64
"""Steps that the record of a fault has, and that are fetched."""
LEGEND = "R retired  F finished, not retired  B begun  · not begun   own work +wait"


def rows(
    rings: RingsDetail | None, retired: Sequence[int | None], roots: Set[Place], title: str, problem: str, width: int
) -> list[Row]:
    """Return the table. `retired`: newest step that each place has acknowledged, in order; `roots`: places to mark."""
    found = [heading(title, width)]
    if rings is None:
        return [*found, row((f"  {clean(problem) or 'asking for the last steps…'}", "bad" if problem else "dim"))]
    stages = ranks_of(rings, {place.stage for place in roots}, _most(width))
    ranked = any(each.rank for each in rings.stages)
    fitting, note = _fitting(stages, roots, width)
    shown = [of_stage(stage, rings.mono_ns) for stage in fitting]  # of a large engine few have room
    listed = numbers(stages, rings.steps)
    if not listed:
        return [*found, row(("  no step was recorded", "dim"))]
    cell = _cell_width(len(shown), width)
    acked = _by_place(rings, retired)
    found += [clip(line, width) for line in _reached(shown, acked, cell, roots, ranked)]
    for number in listed:
        segs: list[Seg] = [(fit(f" m{number}", 10), "strong")]
        for stage in shown:
            text, style = _text(number, stage, acked.get(_place(stage)), cell)
            segs += [(fit(text, cell - 1), style), (" ", "")]
        found.append(clip(Row(tuple(segs)), width))
    notes = [
        each
        for each in (note, *(f"stage {_name(each, ranked)}: {each.error}" for each in stages if each.error))
        if each
    ]
    found.append(clip(row((f" {LEGEND}", "dim")), width))
    return found + [clip(row((f" {clean(each)}", "warn")), width) for each in notes]


def _cell_width(count: int, width: int) -> int:
    return max(_NARROW, min(_WIDE, (width - 10) // max(1, count)))


def _most(width: int) -> int:
    """Return how many columns have room."""
    return max(1, (width - 10) // _NARROW)


def _by_place(rings: RingsDetail, retired: Sequence[int | None]) -> dict[Place, int]:
    """Return the steps by place. `retired` has one a stage, or one a rank of each stage, in order."""
    stages = 1 + max((each.stage for each in rings.stages), default=0)
    ranks = max(1, len(retired) // stages)
    places = (Place(each.stage, each.rank if ranks > 1 else 0) for each in rings.stages)
    steps = {place: place.stage * ranks + place.rank for place in places}
    return {place: step for place, at in steps.items() if at < len(retired) and (step := retired[at]) is not None}


def _place(stage: StageSteps | StageRings) -> Place:
    return Place(stage.stage, stage.rank)


def _name(stage: StageSteps | StageRings, ranked: bool) -> str:
    return short(_place(stage), ranked)


def _fitting(stages: list[StageRings], roots: Set[Place], width: int) -> tuple[list[StageRings], str]:
    """Return the stages that have room, around the root, and how many have none."""
    most = _most(width)
    if len(stages) <= most:
        return stages, ""
    middle = next((at for at, each in enumerate(stages) if _place(each) in roots), 0)
    first = max(0, min(middle - most // 2, len(stages) - most))
    return stages[first : first + most], f"{len(stages) - most} more stages have no room at this width"


def _reached(
    stages: list[StageSteps], retired: Mapping[Place, int], cell: int, roots: Set[Place], ranked: bool
) -> list[Row]:  # fmt: skip
    """Return the head: the stages, and how far each has come."""
    names: list[Seg] = [(fit(" STEP", 10), "dim")]
    for stage in stages:
        root = _place(stage) in roots
        name = _name(stage, ranked)
        long = f"! stage {name} ROOT" if root else f"stage {name}"
        brief = f"!{name}" if root else name
        names += [(fit(long if cell >= _MIDDLE else brief, cell), "bad" if root else "head.word")]
    lines = [Row(tuple(names))]
    for name, values in (
        ("began", [stage.began for stage in stages]),
        ("finished", [stage.finished for stage in stages]),
        ("retired", [_retired(stage, retired) for stage in stages]),
    ):
        segs: list[Seg] = [(fit(f" {name}", 10), "dim")]
        newest = max((value for value in values if value is not None), default=None)
        for value in values:
            behind = value is not None and newest is not None and value < newest
            segs.append((fit("?" if value is None else f"m{value}", cell), "warn" if behind else ""))
        lines.append(Row(tuple(segs)))
    return lines


def _retired(stage: StageSteps, retired: Mapping[Place, int]) -> int | None:
    """Return the newest retired step. The core's figure may be newer than the rings, which end at `finished`."""
    step = retired.get(_place(stage))
    return step if step is None or stage.finished is None else min(step, stage.finished)


def _text(number: int, stage: StageSteps, retired: int | None, cell: int) -> tuple[str, str]:
    """Return what one stage did of one step, and its style."""
    known = stage.cells.get(number)
    if known is None:
        ahead = stage.began is not None and number > stage.began
        return ("·", "dim") if ahead else ("-", "dim")
    if not known.done:
        return _open(known, cell), "bad" if known.total_ms > 2000 else "warn"
    letter = "R" if retired is not None and number <= retired else "F"
    own, style = figures.millis(known.total_ms - known.waited_ms), "" if letter == "R" else "warn"
    if cell < _MIDDLE - 2 or known.waited_ms < 0.05:
        return f"{letter} {own:>4}", style
    return f"{letter} {own:>4} +{figures.millis(known.waited_ms)}", style


def _open(known: StepCell, cell: int) -> str:
    age = figures.millis(known.op_ms if known.op else known.total_ms)
    if cell < _MIDDLE - 2:
        return f"B {age}"
    text = f"B {age:>4} "
    return text + fitting_op(known.op or "own code", cell - 1 - len(text))
