"""The table of the drills, in a terminal and in docs/diagnosis.md."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drill import DEATH_S, HANG_S, SLOW_S, STACKS_S, Result

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "diagnosis.md"
COMMAND = "python tests/drills/run.py"
_PLACES = ("first", "middle", "last", "core", "agent", "gateway", "texts")


def line(result: Result) -> str:
    """Return one drill in one line, for who watches the suite run."""
    where = f"{result.kind} {result.stages}/{result.position}" + (f" rank {result.rank}" if result.tensor > 1 else "")
    if result.problem:
        return f"{where}: SPOILED {result.problem[:100]}"
    return f"{where}: {_cell(result)} [{_roots(result)}] {result.summary or 'nothing was said'} | {result.cleared}"


def table(results: Sequence[Result], controls: Sequence[dict[str, Any]]) -> str:
    """Return the whole report as Markdown, which a terminal shows as well."""
    counted = [result for result in results if not result.problem]
    parts = [_totals(counted), "", *_matrix(counted)]
    spoiled = [line(result) for result in results if result.problem]
    if spoiled:
        parts += ["", "Not counted, because the drill itself failed or could not be had on this machine:", ""]
        parts += [f"- {text}" for text in spoiled]
    if controls:
        parts += ["", *_controls(controls)]
    return "\n".join(parts)


def by_kind(results: Sequence[Result]) -> str:
    """Return a row for each kind, the totals, and the lines of drills that were wrong or do not count."""
    counted = [result for result in results if not result.problem]
    rows = ["| kind | drills | right stage | right cause | in time | seconds |", "|---|---|---|---|---|---|"]
    for kind in dict.fromkeys(result.kind for result in counted):
        mine = [result for result in counted if result.kind == kind]
        rows.append(_row(f"{kind} (held out)" if mine[0].held_out else kind, mine))
    rows.append(_row("shaped", [result for result in counted if not result.held_out]))
    rows.append(_row("held out", [result for result in counted if result.held_out]))
    rows.append(_row("all", counted))
    bad = [result for result in results if result.problem or not result.cause_right or result.false_roots]
    return "\n".join([*rows, "", *(f"- {line(result)}" for result in bad)])


def write(results: Sequence[Result], controls: Sequence[dict[str, Any]]) -> None:
    """Write the report, with date, machine and command, behind what docs/diagnosis.md says by hand."""
    kept = DOCUMENT.read_text() if DOCUMENT.is_file() else "# Diagnosis\n"
    head = kept.partition("\n## Measured")[0].rstrip()
    text = f"{head}\n\n## Measured\n\n{_machine()}\n\n{table(results, controls)}\n"
    DOCUMENT.write_text(text)


def _row(name: str, some: Sequence[Result]) -> str:
    named = sorted(result.named_s for result in some if result.named_s is not None)
    fields = [
        name,
        f"{len(some)}",
        _share([result.stage_right for result in some]),
        _share([result.cause_right for result in some]),
        _share([result.in_time for result in some if not result.silent_is_right]),
        f"{named[0]:.1f} to {named[-1]:.1f}" if named else "-",
    ]
    return "| " + " | ".join(fields) + " |"


# --- totals -------------------------------------------------------------------------------------------------


def _totals(results: Sequence[Result]) -> str:
    groups: list[tuple[str, Callable[[Result], bool]]] = [
        ("all", lambda result: True),
        ("known to the rules' author", lambda result: not result.held_out),
        ("held out", lambda result: result.held_out),
    ]
    rows = [
        "| drills | number | right stage | right cause | undetermined | nothing said | false roots |"
        " in time: hang | death | slow | stacks | cleared with right tokens |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, wanted in groups:
        some = [result for result in results if wanted(result)]
        owed = [result for result in some if not result.silent_is_right]
        cleared = [result for result in some if result.cleared not in ("", "ended")]
        fields = [
            name,
            f"{len(some)}",
            _share([result.stage_right for result in owed]),
            _share([result.cause_right for result in owed]),
            f"{sum(result.undetermined for result in owed)}",
            f"{sum(not result.first for result in owed)}",
            f"{sum(bool(result.false_roots) for result in some)}",
            *(
                _share([result.in_time for result in owed if result.effect == effect])
                for effect in ("hang", "death", "slow")
            ),
            _share([result.stacks_s is not None and result.stacks_s <= STACKS_S for result in some if result.stacks]),
            _share([result.cleared == "right tokens" for result in cleared]),
        ]
        rows.append("| " + " | ".join(fields) + " |")
    answered = [result.answered_s for result in results if result.answered_s is not None]
    way = f" (which was answered after {statistics.median(answered):.2f} s, median)" if answered else ""
    targets = (
        f"Targets: right stage 95 %, right cause 90 %; named within max({HANG_S:g} s, 5 x the step) for a hang, "
        f"{DEATH_S:g} s for a death, {SLOW_S:g} s for a slow stage; stacks within {STACKS_S:g} s. Kinds that need no "
        f"alarm count in `false roots` alone. Seconds are from the command that asked for the fault{way}."
    )
    return "\n".join([*rows, "", textwrap.fill(targets, 100)])


def _share(flags: Sequence[bool]) -> str:
    return f"{sum(flags)}/{len(flags)} ({100 * sum(flags) / len(flags):.0f} %)" if flags else "-"


# --- kinds by positions -------------------------------------------------------------------------------------


def _matrix(results: Sequence[Result]) -> list[str]:
    columns = [(n, place) for n in sorted({r.stages for r in results}) for place in _PLACES]
    columns = [column for column in columns if any((r.stages, r.position) == column for r in results)]
    rows = [
        "| kind | expected | " + " | ".join(f"{n} stages, {place}" for n, place in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for kind in dict.fromkeys(result.kind for result in results):
        mine = {(r.stages, r.position): r for r in results if r.kind == kind}
        one = next(iter(mine.values()))
        name = f"{kind} (held out)" if one.held_out else kind
        cells = [_cell(mine[column]) if column in mine else "" for column in columns]
        rows.append(f"| {name} | {' or '.join(one.expects) or 'no alarm'} | " + " | ".join(cells) + " |")
    return [
        "In a cell: seconds to the first verdict, then whether stage and cause were right; `?`: undetermined,",
        "`-`: no verdict, `!`: a false root.",
        "",
        *rows,
    ]


def _cell(result: Result) -> str:
    false = " !" if result.false_roots else ""
    if result.silent_is_right and not result.first:
        return "silent, right"
    if not result.first:
        return f"-{false}"
    stage = "stage" if result.stage_right else f"NOT {_roots(result)}"
    cause = "?" if result.undetermined else "cause" if result.cause_right else _causes(result)
    return f"{result.detect_s:.1f} s {stage}, {cause}{false}"


def _causes(result: Result) -> str:
    return f"NOT {'+'.join(sorted({cause for _, cause in result.named}))}"


def _roots(result: Result) -> str:
    return ", ".join(f"{cause}@{'core' if stage is None else stage}" for stage, cause in result.named) or "none"


def _controls(controls: Sequence[dict[str, Any]]) -> list[str]:
    rows = ["| negative control | seconds | alarms |", "|---|---|---|"]
    for control in controls:
        said = "; ".join(control["alarms"]) or control["problem"] or "none"
        rows.append(f"| {control['name']}: {control['does']} | {control['seconds']:.0f} | {said} |")
    return rows


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [text.partition(":")[2].strip() for text in lines if text.startswith("model name")]
    model = models[0] if models else platform.machine()
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    load = os.getloadavg()[2]
    return f"{day}; {model}, {os.cpu_count()} processors (load average {load:.1f}); `{COMMAND} --write`."
