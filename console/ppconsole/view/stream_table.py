"""The Streams screen as rows: every stage's streams, the live checks with their keys and findings, and the ledger."""

from __future__ import annotations

from ppengine.protocol.inspection import LedgerDetail
from ppengine.protocol.reports import Finding
from ppengine.protocol.snapshot import ChecksInfo, Snapshot
from ppengine.protocol.stage_info import StageInfo, StreamInfo
from ppengine.protocol.verbs import CheckName, SetCheck

from ppconsole.model.ranks import of_snapshot, place_of, several, words
from ppconsole.model.safe import clean
from ppconsole.model.units import age_text, count_text
from ppconsole.view import figures, ledger
from ppconsole.view.cells import (
    EMPTY,
    FLEX,
    Column,
    Placed,
    Row,
    Seg,
    clip,
    fit,
    fitted,
    header,
    place,
    row,
    table_row,
    wrap,
)
from ppconsole.view.drilldown import heading
from ppconsole.view.marks import faulty_places
from ppconsole.view.wording import STREAM, with_rank

CHECKS: tuple[tuple[CheckName, str], ...] = (
    ("ledger", "hand-offs between streams and threads"),
    ("strict", "every operation is waited for before the next"),
    ("finite", "values that leave a stage"),
    ("shadow", "a single-stage reference repeats some steps"),
    ("checksum", "hidden states between stages"),
)
SHADOW_SHARE = 0.01
"""Share of the steps when the key switches the shadow check on; the command line takes any."""
FINDINGS, LEDGER = "FINDINGS", "LEDGER"
_COLUMNS = (
    Column("stage", STREAM["stage"], 4, 0),
    Column("name", STREAM["name"], 12, 1),
    Column("owner", STREAM["owner"], 12, 4),
    Column("op", STREAM["op"], 20, 2, grow=FLEX),
    Column("age", STREAM["age"], 5, 3, ">"),
    Column("pending", STREAM["pending"], 4, 5, ">"),
    Column("waits", STREAM["waits"], 9, 6, grow=16),
)
"""STREAM and OWNER are as wide as their longest name, so that the operation is whole."""
_RANKED = (_COLUMNS[0]._replace(width=6), *_COLUMNS[1:3], _COLUMNS[3]._replace(width=24), *_COLUMNS[4:])
"""The same with names of ranks, `12.1`, and room for `! all_reduce<0.1 m38058`."""


def toggle(name: CheckName, checks: ChecksInfo) -> SetCheck:
    """Return the verb of a check's key: on if it is off, and off if it is on."""
    if getattr(checks, name):
        return SetCheck(check=name, mode="off")
    return SetCheck(check=name, mode="on", share=SHADOW_SHARE if name == "shadow" else None)


def rows(
    snapshot: Snapshot | None, findings: list[Finding] | None, problem: str, width: int, act: bool = True, *,
    known: LedgerDetail | None = None, missing: str = "",
) -> list[Row]:  # fmt: skip
    """Return the screen. `findings` None: not fetched yet, or `problem` says why not; `act`: the keys act.

    `known` None: the ledger was not fetched yet, or `missing` says why it is not known.
    """
    if snapshot is None:
        return [row(("  waiting for the first sample", "dim"))]
    count = snapshot.engine.checks.findings if findings is None else len(findings)
    more = f"  {count} finding{'' if count == 1 else 's'}: ⇥ goes there" if count else ""
    found = [heading(f"LIVE CHECKS{more}", width), *_checks(snapshot.engine.checks, width, act)]
    streams = [stream for stage in snapshot.stages for stream in stage.streams]
    names = {"name": [each.name for each in streams], "owner": [each.owner for each in streams]}
    columns = _RANKED if several(snapshot) else _COLUMNS
    placed = place(fitted(columns, names), width - 1)
    titles = header(placed, fill="head")
    found.append(Row(((" ", ""), *titles.segs), "head"))
    faulty = faulty_places(snapshot)
    for stage in snapshot.stages:
        found += _stage(stage, of_snapshot(snapshot, stage), placed, place_of(stage) in faulty)
    found += [EMPTY, heading(f"{FINDINGS}  {count}", width)]
    found += _findings(findings, snapshot.engine.checks, problem, width)
    if snapshot.engine.checks.ledger:
        found += [EMPTY, heading(LEDGER, width), *ledger.rows(known, missing, width)]
    return found


def _checks(checks: ChecksInfo, width: int, act: bool) -> list[Row]:
    """Return one line a check: key, name, whether it is on, purpose."""
    lines = []
    for number, (name, text) in enumerate(CHECKS, start=1):
        on = bool(getattr(checks, name))
        word = "ON " if on else "off"
        more = ""
        if name == "shadow" and (on or checks.shadow_state):
            share = f"{checks.shadow:.1%} of the steps, " if on else ""
            more = f"  {share}{clean(checks.shadow_state)}, {checks.shadow_compared} tokens compared"
        key = f"  {number} " if act else "    "
        lines.append(
            clip(row((key, "key"), (f"{name:<8} ", "strong" if on else ""), (word, "ok" if on else "dim"),
                     (f"  {text}", "dim"), (more, "")), width)
        )  # fmt: skip
    return lines


def _stage(stage: StageInfo, name: str, placed: list[Placed], is_faulty: bool) -> list[Row]:
    """Return one row a stream. An operation older than two seconds is marked `!`, but not that of an idle stage."""
    lines = []
    for index, stream in enumerate(stage.streams):
        busy = bool(stream.op) and (stream.op, stage.state) != ("idle", "idle")
        old = busy and (stream.age_ms or 0.0) > ledger.OLD_MS
        op = with_rank(stream.op or "", stage)
        label = f"{'!' if is_faulty else ' '}{name:>2}" if not index else ""
        cells: dict[str, Seg] = {
            "stage": (label, "bad" if is_faulty else "strong"),
            "name": (stream.name, "strong"),
            "owner": (stream.owner, ""),
            "op": ((f"! {op}" if old else op or _idle(stream)), _op_style(stream, old)),
            "age": (figures.age(stream.age_ms) if stream.op else "-", "warn" if old else "dim"),
            "pending": (count_text(stream.pending), "warn" if (stream.pending or 0) > 1 else "dim"),
            "waits": (stream.waits_for or "", "warn"),
        }
        lines.append(Row(((" ", ""), *table_row(placed, cells).segs)))
    if not stage.streams:
        lines.append(row((f"  {name:>2} ", "strong"), (f"reports no streams: {stage.state}", "dim")))
    return lines


def _idle(stream: StreamInfo) -> str:
    """Return the text of an idle stream; for a device's, with its last finished step."""
    return "idle" if stream.done_step is None else f"idle, done m{stream.done_step}"


def _op_style(stream: StreamInfo, old: bool) -> str:
    return "bad" if old else "" if stream.op else "dim"


def _findings(findings: list[Finding] | None, checks: ChecksInfo, problem: str, width: int) -> list[Row]:
    """Return each finding with its evidence: both call sites, and what would put it right."""
    on = checks.ledger or checks.finite or checks.checksum or checks.shadow
    if findings is None:
        text = clean(problem) or ("asking…" if on else "no check is on, so nothing is looked for")
        return [row((f"  {text}", "bad" if problem else "dim"))]
    if not findings:
        return [row(("  none so far" if on else "  no check is on, so nothing is looked for", "ok" if on else "dim"))]
    lines: list[Row] = []
    for number, finding in enumerate(findings, start=1):
        where = "" if finding.stage is None else f"{words(finding.stage, finding.rank)} "
        head = f" {number} {where}{finding.cause}, first seen {age_text(finding.since_s)} ago"
        lines.append(row((fit(head, width), "alert")))
        summary = clean(finding.summary).removeprefix(f"{where.rstrip()}: ")
        lines += [row(("  ", ""), (line, "strong")) for line in wrap(summary, width - 4)]
        for item in finding.evidence:
            lines += _fact(item, width)
        lines.append(EMPTY)
    return lines


def _fact(text: str, width: int) -> list[Row]:
    """Return one fact; the label of its cause and of its fix has a colour."""
    label, colon, rest = clean(text).partition(": ")
    if not colon or len(label) > 14:
        label, rest = "", clean(text)
    parts = wrap(rest, max(20, width - 16))
    style = "ok" if label == "to fix" else ""
    found = [row((f"  {label:>11}  ", "accent" if label else "dim"), (parts[0], style))]
    return found + [row((" " * 15, ""), (part, style)) for part in parts[1:]]
