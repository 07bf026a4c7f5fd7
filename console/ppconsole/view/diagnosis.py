"""The Diagnosis screen as rows: picture, verdict, what to do, evidence, stacks, and the last steps at the fault."""

from __future__ import annotations

from typing import NamedTuple

from ppengine.protocol.inspection import FaultDetail, RingsDetail, StacksDetail
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import IncidentInfo, Snapshot, Verdict, is_beside

from ppconsole.model.facts import evidence_lines, headline, root_verdict
from ppconsole.model.pressure import pressure_lines
from ppconsole.model.ranks import place_of, words
from ppconsole.model.safe import clean
from ppconsole.model.suggestion import Suggestion, suggestion
from ppconsole.model.units import age_text, wall_text
from ppconsole.model.waits import arrows
from ppconsole.view import pipeline, step_table
from ppconsole.view.banner import Link
from ppconsole.view.cells import EMPTY, Row, clip, fit, row, width_of, wrap
from ppconsole.view.drilldown import heading, stacks_rows
from ppconsole.view.marks import faulty_places

TWO_COLUMNS = 140
"""From this width on the steps are beside the stacks."""


class Known(NamedTuple):
    """Details beside the snapshot. `problem`: why there are no steps; `taking`: stacks are being taken."""

    fault: FaultDetail | None = None
    rings: RingsDetail | None = None
    stacks: StacksDetail | None = None
    problem: str = ""
    stacks_problem: str = ""
    taking: bool = False
    past: bool = False
    """Nothing more can be taken."""


class Page(NamedTuple):
    """All rows, and where the sections begin."""

    rows: list[Row]
    sections: tuple[int, ...]


def verdict_of(snapshot: Snapshot | None, known: Known) -> Verdict | None:
    """Return the verdict that the screen is about: the present root, otherwise that of the frozen fault."""
    now = root_verdict(snapshot) if snapshot is not None else None
    if now is not None:
        return now
    return known.fault.verdict if known.fault is not None else None


def old_text(link: Link, sampled_at: float) -> str:
    """Return that the picture is old, and of which time; empty while the link is live or if this is the past."""
    if link.live or link.state == "ended":
        return ""
    age = "" if link.age_s is None else f" for {age_text(link.age_s)}"
    why = {"lost": f"link lost{age}", "stale": f"no sample{age}", "new-epoch": "the engine was restarted"}
    return f"{why.get(link.state, link.state)}: the diagnosis is of {_clock(sampled_at)}"


def page(snapshot: Snapshot | None, known: Known, width: int, off: str = "", ended: str = "", old: str = "") -> Page:
    """Return the whole screen for `width` cells. `off`: why no verb is possible now; empty when they are.

    `ended`: when and why the engine ended. `old`: since when no sample comes, and the time of the newest one.
    """
    if snapshot is None:
        return Page([row(("  waiting for the first sample", "dim"))], (0,))
    verdict = verdict_of(snapshot, known)
    head = [row((fit(f" {part}", width), "alert")) for part in wrap(ended, width - 2)] if ended else []
    head += [row((fit(f"  {part}", width), "alert.warn")) for part in wrap(old, width - 2)] if old else []
    if verdict is not None or not ended:
        head += _verdict(snapshot, known, verdict, width, old=bool(old))
    if verdict is not None and root_verdict(snapshot) is not None:  # without a fault there is nothing to do
        head += _todo(suggestion(verdict.suggest), width, off)
    head += [heading("PIPELINE  an arrow points from a waiting stage to the one it waits for", width)]
    head += pipeline.rows(snapshot, width)
    side = (width - 2) // 2 if width >= TWO_COLUMNS else width
    why = [] if verdict is None else [*_evidence(verdict, side), *_others(snapshot, verdict, side)]
    drawn = [arrow for arrow in arrows(snapshot.waits) if pipeline.between_neighbours(arrow)]
    if long := pipeline.words(drawn, side, 8):
        why += [row(("  the arrows in words", "dim")), *long]
    why = [heading("WHY", side), *why, EMPTY] if why else []
    stacks = [heading("STACKS", side), *_stacks(known, side)]
    last = _steps(snapshot, known, width - side - 2 if side < width else width)
    begin = len(head)
    if side < width:
        rows = [*head, EMPTY, *_beside([*why, *stacks], last, side)]
        return Page(rows, (0, begin + 1, begin + 1 + len(why)))
    rows = [*head, *why, *stacks, EMPTY, *last]
    at = begin + len(why)
    return Page(rows, (0, begin, at, at + len(stacks) + 1))


def _beside(left: list[Row], right: list[Row], side: int) -> list[Row]:
    """Return two columns of rows as one."""
    found = []
    for index in range(max(len(left), len(right))):
        one = clip(left[index], side) if index < len(left) else EMPTY
        two = right[index] if index < len(right) else EMPTY
        pad = " " * (side - sum(width_of(text) for text, _ in one.segs) + 2)
        fill = one.fill if one.fill == two.fill else ""
        # A head over one column only: the style of the row goes to its segments.
        mine = [(text, style or one.fill) for text, style in one.segs] if fill != one.fill else list(one.segs)
        yours = [(text, style or two.fill) for text, style in two.segs] if fill != two.fill else list(two.segs)
        found.append(Row((*mine, (pad, ""), *yours), fill))
    return found


def _verdict(snapshot: Snapshot, known: Known, verdict: Verdict | None, width: int, *, old: bool) -> list[Row]:
    """Return the verdict, in bold; that there is no fault, or in an `old` picture was none; or the last fault."""
    good = "dim" if old else "ok"
    if verdict is None:
        state, message = snapshot.engine.state, clean(snapshot.engine.message)
        text = message if message.startswith(state) else f"{state}{f', {message}' if message else ''}"
        found_none = "no fault found by then" if old else "no fault found"
        found = [row((f"  {found_none}", good), (f": {text}", good if old else ""))]
        return found + [row((f"  {part}", "")) for line in pressure_lines(snapshot) for part in wrap(line, width - 4)]
    now, found = root_verdict(snapshot), []
    if now is None:
        over = _healed_at(snapshot, known.fault)
        text = f"  no fault {'by then' if old else 'now'}; this one was healed{f' at {_clock(over)}' if over else ''}"
        found.append(row((fit(text, width), good)))
    style = "alert" if verdict.root and now is not None and verdict.cause != "undetermined" else "alert.warn"
    name = f"! {headline(verdict)}" if now is not None else headline(verdict, over=True)
    found.append(row((fit(f" {name}, {_lasted(snapshot, known, verdict, over=now is None)} ", width), style)))
    summary = verdict.summary.removeprefix(f"{_where(verdict)}: ")
    found += [row(("  ", ""), (line, "strong")) for line in wrap(summary, width - 4)]
    if verdict.cause.startswith("stream_"):
        found.append(row(("  v shows the streams, and every finding with both call sites", "dim")))
    return found


def _lasted(snapshot: Snapshot, known: Known, verdict: Verdict, *, over: bool) -> str:
    """Return `for 3.1s`; of a fault that is `over`, the time from its begin to its end, and not that of its report."""
    fault = known.fault if over else None
    if fault is None:
        return f"for {age_text(verdict.since_s)}"
    end, info = _healed_at(snapshot, fault), _incident_of(snapshot, fault)
    begin = fault.wall - verdict.since_s if info is None else info.wall
    return f"reported for {age_text(verdict.since_s)}" if end is None else f"healed after {age_text(end - begin)}"


def _healed_at(snapshot: Snapshot, fault: FaultDetail | None) -> float | None:
    """Return the end of a fault, as the badge has it if it is the newest incident: a verdict stays a little longer."""
    if fault is None:
        return None
    info = _incident_of(snapshot, fault)
    return fault.over_wall if info is None else info.over_wall or fault.over_wall


def _incident_of(snapshot: Snapshot, fault: FaultDetail) -> IncidentInfo | None:
    """Return the newest incident unless it is of another fault: each record of a fault makes an incident."""
    info, verdict = snapshot.incident, fault.verdict
    if info is None or info.wall > fault.wall or (info.stage, info.rank) != (verdict.stage, verdict.rank):
        return None
    # A store, a process or a disk has no stage either, as the core.
    return info if is_beside(info.cause, info.stage) == is_beside(verdict.cause, verdict.stage) else None


def _todo(wanted: Suggestion, width: int, off: str = "") -> list[Row]:
    """Return what to do, and the key that does it."""
    if not wanted.text:
        return []
    lines = wrap(wanted.text, width - 9)
    rows = [row(("  do   > ", "accent"), (lines[0], "key"))]
    rows += [row((" " * 9, ""), (line, "key")) for line in lines[1:]]
    if not wanted.words:
        hint = "y copies it: it is for a shell on the engine's host" if wanted.is_shell else ""
    elif wanted.name in ("stacks", "logs"):
        hint = f"Enter shows the {wanted.name}   y copies the line"
    elif off:
        hint = f"{off}; y copies the line"
    else:
        hint = "Enter runs it, after a look at the plan   y copies the line"
    return [*rows, row((f"         {hint}", "dim"))] if hint else rows


def _evidence(verdict: Verdict, width: int) -> list[Row]:
    rows: list[Row] = []
    for item in evidence_lines(verdict):
        parts = wrap(item, width - 4)
        rows.append(row(("  - ", "dim"), (parts[0], "")))
        rows += [row(("    ", ""), (part, "")) for part in parts[1:]]
    return rows


def _others(snapshot: Snapshot, verdict: Verdict, width: int) -> list[Row]:
    """Return the other verdicts: further roots in full, who only suffers in one line each."""
    rows: list[Row] = []
    for other in snapshot.verdicts:
        if other is verdict:
            continue
        head = headline(other).lower()
        if other.root:
            rows += [EMPTY, row((fit(f" ! {head}, for {age_text(other.since_s)}", width), "alert"))]
            rows += [row(("  ", ""), (line, "strong")) for line in wrap(other.summary, width - 4)]
            rows += [*_todo(suggestion(other.suggest), width)[:1], *_evidence(other, width)]
        else:
            text = f"{head} {age_text(other.since_s)}: {clean(other.summary)}"
            rows += [row(("  ", ""), (part, "warn")) for part in wrap(text, width - 2)]
    return rows


def _stacks(known: Known, width: int) -> list[Row]:
    """Return the stacks that were taken here, or else those that were taken for the verdict."""
    if known.stacks is not None or known.stacks_problem or known.taking:
        return stacks_rows(known.stacks, known.stacks_problem, width)
    if known.fault is not None and known.fault.stacks is not None and known.fault.stacks.all:
        more = "" if known.past else "; t takes those of all now"
        head = row((f"  taken for the verdict{more}", "dim"))
        return [head, *stacks_rows(known.fault.stacks, "", width)]
    note = "none were taken at that time" if known.past else "t takes them: stages and core stop for a moment"
    return [row((f"  {note}", "dim"))]


def _steps(snapshot: Snapshot, known: Known, width: int) -> list[Row]:
    """Return the last steps: frozen at the fault, or as they were at the last look."""
    fault, title = known.fault, f"LAST {step_table.COUNT} STEPS"
    if fault is not None:
        title += f"  frozen at the fault, {_clock(fault.wall)}: fault {fault.number} of this engine"
        missing = "; ".join(fault.missing) or ("" if fault.over_wall is None else "the rings did not come in time")
        roots = {
            Place(each.stage, each.rank)
            for each in (fault.rings.stages if fault.rings is not None else [])
            if each.stage == fault.verdict.stage and fault.verdict.rank in (None, each.rank)
        }
        return step_table.rows(fault.rings, fault.retired, roots, title, missing, width)
    ordered = sorted(snapshot.stages, key=place_of)
    retired = [stage.retired_step for stage in ordered]
    title += f"  as of {_clock(known.rings.wall)}" if known.rings is not None else ""
    return step_table.rows(known.rings, retired, faulty_places(snapshot), title, known.problem, width)


def _where(verdict: Verdict) -> str:
    """Return the stage of a verdict in words, with its rank if it names one."""
    return "" if verdict.stage is None else words(verdict.stage, verdict.rank)


def _clock(wall: float) -> str:
    return wall_text(wall)
