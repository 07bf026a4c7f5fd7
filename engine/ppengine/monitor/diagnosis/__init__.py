"""The verdict: a pure function of evidence. Missing evidence gives "undetermined", never a guess.

`graph` says who waits for whom; each family of causes has its rules in a file of its own; `RULES` is their order.
A stage gets one verdict: that of the first rule that names it. Who only suffers is told last, and is never a root.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from ppengine.monitor.diagnosis import driver, findings, messages, processes, slow, stuck, suffer, wires
from ppengine.monitor.diagnosis.budgets import PHASE_BUDGET_S, stuck_limit_s
from ppengine.monitor.diagnosis.case import Case
from ppengine.monitor.diagnosis.graph import build
from ppengine.monitor.evidence import Evidence
from ppengine.protocol.snapshot import Cause, Verdict, WaitInfo

__all__ = ["PHASE_BUDGET_S", "RULES", "STACKS_WANTED", "diagnose", "stuck_limit_s", "tripped", "waits"]

RULES: tuple[Callable[[Case], list[Verdict]], ...] = (
    messages.mismatched,
    processes.ended,
    processes.stopped,
    driver.driver,
    wires.broken,
    findings.found,
    stuck.gil_holders,
    stuck.idlers_in_vain,
    slow.slow_phases,
    stuck.standing_still,
    stuck.hanging_maps,
    stuck.without_control,
    messages.remembered,
    findings.remembered,
    wires.healed,
    slow.stragglers,
    suffer.sufferers,
)
STACKS_WANTED = frozenset({"self_stuck", "gil_held", "deadlock", "undetermined", "driver"})
"""Causes whose evidence is better with the line of code."""
_MOST_CHARACTERS = 100


def diagnose(evidence: Evidence) -> list[Verdict]:
    """Return the findings, roots first, each once; empty when nothing is wrong."""
    case = Case(evidence, build(evidence), [])
    for rule in RULES:
        for verdict in rule(case):
            if _key(verdict) not in map(_key, case.found):
                case.found.append(_one_line(verdict))
    return sorted(case.found, key=lambda verdict: (not verdict.root, verdict.cause in ("starved", "blocked")))


def waits(evidence: Evidence) -> list[WaitInfo]:
    """Return who waits for whom now, as the picture of the pipeline shows it."""
    return [
        WaitInfo(waiter=str(wait.waiter), on=str(wait.on), what=wait.text, since_s=wait.since_s)
        for wait in build(evidence).waits.values()
    ]


def tripped(error: Exception) -> Verdict:
    """Return what is told where judging failed, with the place in the code."""
    frames = traceback.extract_tb(error.__traceback__)
    evidence = [f"in {frame.name}, {Path(frame.filename).name}:{frame.lineno}: {frame.line}" for frame in frames[-1:]]
    return _one_line(
        Verdict(
            stage=None,
            cause="undetermined",
            summary=f"the diagnosis failed: {type(error).__name__}: {error}",
            since_s=0.0,
            evidence=[*evidence, "the engine goes on; missing: every verdict"],
            suggest="ppconsole logs (the whole trace, to be reported)",
        )
    )


def _key(verdict: Verdict) -> int | Cause:
    """Return what a verdict is alone on: a stage, or a cause that is no stage's."""
    return verdict.cause if verdict.stage is None else verdict.stage


def _one_line(verdict: Verdict) -> Verdict:
    """Keep the summary to one line of the banner."""
    text = " ".join(verdict.summary.split())
    short = text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 3] + "..."
    return msgspec.structs.replace(verdict, summary=short)
