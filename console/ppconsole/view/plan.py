"""Content of the confirm dialog: target, epoch, the plan of the dry run, the CLI line."""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

from ppengine.protocol.control import Outcome, Refused
from ppengine.protocol.snapshot import RequestInfo, Snapshot
from ppengine.protocol.verbs import Many, SetMemory, Verb

from ppconsole.model import choosing
from ppconsole.model.choosing import Choice
from ppconsole.model.plan_age import SHOWN_S
from ppconsole.model.safe import clean
from ppconsole.model.units import age_text
from ppconsole.view.cells import EMPTY, Row, Seg, fit, row, width_of, wrap
from ppconsole.view.commands import cli_line, effect_of, requests_of, target_of
from ppconsole.view.lowering import ASIDE, DETAIL, SPARE, TARGET, VITAL, Weighed, weighed
from ppconsole.view.marks import request_mark


class Since(NamedTuple):
    """Numbers of requests that have changed since a dialog opened."""

    ended: int = 0
    gone: int = 0
    """Those of the verb that live and do not match its filter any more."""
    new: int = 0
    """Those that match its filter now, and are not in it."""


CONFLICTS_SHOWN = 5
"""Most conflicts that are shown with a plan."""
_SHELL_LINES = 3
"""Most lines of the shell line; `y` copies all of it."""


def head_rows(
    verb: Verb, snapshot: Snapshot, revision: int | None, width: int, hidden: int = 0, choice: Choice = choosing.NAMED
) -> list[Weighed]:
    """Return what the dialog is about: effect, target with its present state, epoch and revision.

    `hidden`: requests of the verb that the filter of the table hides. `choice`: how its requests were chosen.
    """
    engine = snapshot.engine
    rows = [Weighed(_field("effect", effect_of(verb)), DETAIL)]
    target = f"{target_of(verb)} of {engine.name}"
    if isinstance(verb, Many):
        target = f"{clean(choice.words(len(verb.verbs)))}, on {engine.name}"
    rows.append(Weighed(_field("target", target, "strong"), VITAL))
    request = _request(verb, snapshot)
    if request is not None:
        mark = request_mark(request.state)
        text = (
            f"{age_text(request.age_s)} old, {request.prompt_tokens}+{request.output_tokens} tokens, "
            f"{request.blocks} blocks, {request.swap_blocks} on the host"
        )
        rows.append(Weighed(row(("now     ", "dim"), (f"{mark.text} ", mark.style), (text, "")), ASIDE))
    if isinstance(verb, SetMemory):
        rows.append(Weighed(memory_row(verb.utilization, snapshot), TARGET))
    if isinstance(verb, Many):
        notes = [f"{hidden} of them {'is' if hidden == 1 else 'are'} hidden by the filter"] if hidden else []
        if unlisted := choosing.unlisted(snapshot):
            notes.append(unlisted)
        rows += [Weighed(_field("note", note, "warn"), ASIDE) for note in notes]
    seen = "" if revision is None else f"   revision {revision}"
    rows.append(Weighed(_field("epoch", f"{engine.epoch[:16]}{seen}"), SPARE))
    return [line for each in rows for line in weighed(_wrapped(each.row, width), each.weight)]


def since_opened(verb: Verb, choice: Choice, now: Snapshot | None) -> tuple[Set[str], Since]:
    """Return the requests of a verb that have ended, and the changes of its requests up to the snapshot `now`."""
    if now is None:
        return frozenset(), Since()
    named = set(requests_of(verb))
    live = {each.id for each in now.requests if each.state != "finished"}
    # A request that is not listed may live, if the list is not whole.
    ended = named - live if not choosing.unlisted(now) else named & {each.id for each in now.requests} - live
    if not choice.filter:
        return ended, Since(len(ended))
    matching = {each.id for each in choosing.live_matches(now, choice.filter)}
    return ended, Since(len(ended), len((named & live) - matching), len(matching - named))


def memory_row(utilization: float, snapshot: Snapshot) -> Row:
    """Return the memory utilization now and after a change."""
    return _field("util", f"{snapshot.engine.memory_utilization:g} -> {utilization:g}", "strong")


def _request(verb: Verb, snapshot: Snapshot) -> RequestInfo | None:
    """Return the request that the verb names, if it is still listed."""
    target = getattr(verb, "request", None)
    return next((each for each in snapshot.requests if each.id == target), None)


def _field(name: str, text: str, style: str = "") -> Row:
    """Return one labelled line."""
    return row((f"{name:<8}", "dim"), (text, style))


def _wrapped(line: Row, width: int) -> list[Row]:
    """Return `line` with its last segment wrapped under itself."""
    *labels, (text, style) = line.segs
    indent = sum(width_of(part) for part, _ in labels)
    parts = wrap(text, max(10, width - indent))
    rows = [Row((*labels, (parts[0], style)))]
    return rows + [row((" " * indent, ""), (part, style)) for part in parts[1:]]


def plan_rows(answer: Outcome | Refused | None, width: int) -> list[Weighed]:
    """Return the dry run's answer: the plan in words, which has its figures, or why it cannot be done.

    Its second line has the fate of the requests, so the first two stay longest.
    """
    if answer is None:
        return weighed([row(("plan    ", "dim"), ("asking the engine…", "dim"))], VITAL)
    if isinstance(answer, Refused):
        return weighed(_wrapped(row((f"{answer.code}  ", "bad"), (answer.text, "bad")), width), VITAL)
    rows: list[Weighed] = []
    lines = answer.plan or [answer.text]
    for index, line in enumerate(lines):
        label: Seg = ("plan    " if index == 0 else "        ", "dim")
        rows += weighed(_wrapped(row(label, (line, "")), width), VITAL if index < 2 else DETAIL)
    for line in conflict_lines(answer):
        rows += weighed(_wrapped(row(("        ", ""), (line, "warn")), width), ASIDE)
    if answer.override:
        text = "requests of other keys: doing it overrides their owners, and the audit log says so"
        rows += weighed(_wrapped(row(("        ", ""), (text, "warn")), width), VITAL)
    return rows


def age_row(age_s: float, since: Since, width: int) -> Row:
    """Return the age of the plan, and how its requests have changed since the dialog opened; blank: it is new."""
    parts = [f"plan {age_text(age_s)} old"] if age_s >= SHOWN_S else []
    if since.ended:
        parts.append(f"{since.ended} ended since")
    if since.gone:
        parts.append(f"{since.gone} {'matches' if since.gone == 1 else 'match'} no more")
    if since.new:
        parts.append(f"+{since.new} since match; {'it is' if since.new == 1 else 'they are'} not in it")
    if not parts:
        return EMPTY
    return row(("        ", ""), (fit(", ".join(parts), width - 8), "warn" if any(since) else "dim"))


def conflict_lines(answer: Outcome) -> list[str]:
    """Return the first requests that a plan excludes, with the reasons, and how many more there are."""
    lines = [f"not {each.request}: {each.text}" for each in answer.conflicts[:CONFLICTS_SHOWN]]
    if (more := len(answer.conflicts) - CONFLICTS_SHOWN) > 0:
        lines.append(f"... and {more} more that cannot be done")
    return lines


def cli_rows(verb: Verb, engine: str, width: int, reason: str = "") -> list[Weighed]:
    """Return the equivalent CLI line; of a long one the beginning. `reason`: of an override, empty without one."""
    rows = _wrapped(row(("shell   ", "dim"), (cli_line(verb, engine, reason), "key")), width)
    if len(rows) > _SHELL_LINES:
        rows[_SHELL_LINES - 1 :] = [row((f"        … {len(rows) - _SHELL_LINES + 1} more lines", "dim"))]
    return [*weighed(rows[:1], DETAIL), *weighed(rows[1:], SPARE)]


def conflict_rows(answer: Refused, changes: list[str], width: int) -> list[Row]:
    """Return what a conflict means and what has changed since the dialog opened."""
    rows = _wrapped(row(("CONFLICT  ", "alert"), (answer.text, "bad")), width)
    for change in changes:
        rows.extend(_wrapped(row(("changed ", "dim"), (change, "warn")), width))
    return [*rows, row(("        ", ""), ("nothing was done; look again to see the plan for how it is now", "dim"))]


def changes_since(before: Snapshot, after: Snapshot, verb: Verb) -> list[str]:
    """Return what changed about the verb's target between two snapshots, in words."""
    old, new = _request(verb, before), _request(verb, after)
    if old is not None and new is None:
        return [f"{old.id} is gone"]
    found = []
    if old is not None and new is not None:
        for name in ("state", "blocks", "swap_blocks", "priority", "revision"):
            one, two = getattr(old, name), getattr(new, name)
            if one != two:
                found.append(f"{name.replace('_', ' ')} {one} > {two}")
    one_engine, two_engine = before.engine, after.engine
    if one_engine.memory_revision != two_engine.memory_revision:
        found.append(
            f"memory utilization {one_engine.memory_utilization:g} > {two_engine.memory_utilization:g}, "
            f"revision {one_engine.memory_revision} > {two_engine.memory_revision}"
        )
    if one_engine.epoch != two_engine.epoch:
        found.append(f"epoch {one_engine.epoch[:16]} > {two_engine.epoch[:16]}")
    return found
