"""Faults of processes beside the pipeline, which are stopped or hang: steps go on, and something else does not.

All of them are one verdict without a stage, of the first; `further` has the others.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import NamedTuple

from ppengine.diagnosis.budgets import HELPER_OWES_S, HELPER_SILENT_S, HELPER_STARTS_S, STOPPED_AFTER_S, TRACED_AFTER_S
from ppengine.diagnosis.case import Case
from ppengine.diagnosis.helper_evidence import HelperEvidence
from ppengine.diagnosis.phrases import let_go, seconds, thaw
from ppengine.protocol.snapshot import FurtherFault, Verdict
from ppengine.protocol.stage_samples import TRACED

_EFFECTS = {
    "supervisor": "requests go on; no process that ends is restarted, and a stop ends core and stages alone",
    "texts": "requests and prompts of token ids go on; texts of consoles wait, stop texts are found late",
    "forkserver": "requests go on; no stage can be started, so a lost one does not come back",
    "agent": "requests go on; stages are not sampled, so their faults are named late or not at all",
}


class _Trouble(NamedTuple):
    """One process that does not go on."""

    subject: str
    summary: str
    since_s: float
    evidence: list[str]
    suggest: str


def helpers(case: Case) -> list[Verdict]:
    """Return one verdict on all processes beside the pipeline that do not go on, HTTP processes first."""
    if case.evidence.stopping or case.evidence.core.dead_for_s is not None:
        return []
    order = sorted(case.evidence.helpers, key=lambda each: each.role in _EFFECTS)
    found = list(filter(None, map(_trouble, order)))
    if not found:
        return []
    first, *others = found
    further = [FurtherFault(subject=one.subject, summary=one.summary, suggest=one.suggest) for one in others]
    return [
        Verdict(
            stage=None, cause="process", subject=first.subject, summary=first.summary, since_s=first.since_s,
            evidence=first.evidence, suggest=first.suggest, further=further,
        )
    ]  # fmt: skip


def _trouble(one: HelperEvidence) -> _Trouble | None:
    """Return the fault of a process: a signal, a tracer or a cgroup has stopped it, or it sends no reports."""
    name = f"{one.role} ({_kind(one)}pid {one.pid})"
    state = f"pid {one.pid}: process state {one.process_state or 'unknown'}"
    stopped, silent = one.stopped_for_s or 0.0, one.silent_for_s
    if one.frozen and stopped >= STOPPED_AFTER_S:
        how, suggest = f"is frozen by its cgroup ({PurePath(one.frozen).parent})", thaw(one.frozen)
    elif one.process_state == TRACED and stopped >= TRACED_AFTER_S:
        how, suggest = f"is stopped by {one.tracer or 'a tracer'} (state t)", let_go(one.tracer)
    elif one.process_state == "T" and stopped >= STOPPED_AFTER_S:
        how, suggest = "is stopped by a signal (state T)", f"kill -CONT {one.pid}"
    elif one.stopped_for_s is None and one.owes_for_s is not None and one.owes_for_s >= HELPER_OWES_S:
        silent = one.owes_for_s
        how, suggest = f"has not answered the core for {seconds(silent)}", _restart(one)
    elif not one.reported and silent >= HELPER_STARTS_S:
        how, suggest = f"has not come up for {seconds(silent)}", "ppconsole logs"
    elif one.reported and one.stopped_for_s is None and silent >= HELPER_SILENT_S:
        how, suggest = f"hangs: no report for {seconds(silent)}", _restart(one)
        state += "; it reports each second"
    else:
        return None
    subject = f"{one.role} of {one.parent}" if one.parent else one.role
    return _Trouble(subject, f"{name} {how}", stopped or silent, [state, _effect(one)], suggest)


def _kind(one: HelperEvidence) -> str:
    if one.parent:
        return f"child of {one.parent}, "
    return "" if one.role in _EFFECTS else "HTTP process, "


def _effect(one: HelperEvidence) -> str:
    """Return the work that waits for a process."""
    if one.role in _EFFECTS:
        return _EFFECTS[one.role]
    if one.parent:
        return "requests that need it wait until another one takes its place; the others go on"
    share = "new connections wait" if one.of == 1 else f"1 of {one.of} new connections waits"
    answers = f"{one.open} open answer{'' if one.open == 1 else 's'}"
    return f"steps go on; {share} for it, as do {answers} of its newest report"


def _restart(one: HelperEvidence) -> str:
    if one.role == "supervisor":
        return f"py-spy dump --pid {one.pid} (its end is that of the engine, without serve --restart)"
    lost = "" if one.parent or one.role in _EFFECTS else "; its open answers are lost"
    return f"kill -KILL {one.pid} (another one is started{lost})"
