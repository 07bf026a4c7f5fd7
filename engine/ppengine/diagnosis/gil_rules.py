"""A GIL that one thread keeps, for good or again and again: no other thread of the stage can run meanwhile."""

from __future__ import annotations

from ppengine.diagnosis.budgets import GIL_AFTER_S, holds_gil, shares_gil
from ppengine.diagnosis.case import Case, thread_lines
from ppengine.diagnosis.evidence import StageEvidence
from ppengine.diagnosis.phrases import percent, seconds, where
from ppengine.diagnosis.stuck_rules import verdict
from ppengine.protocol.snapshot import Verdict


def holders(case: Case) -> list[Verdict]:
    """Return the stages whose control thread cannot run because another thread keeps the GIL."""
    return [_held(stage) for stage in case.evidence.stages if holds_gil(stage)]


def sharers(case: Case) -> list[Verdict]:
    """Return the stages whose GIL is held for much of the time; they work on, slower."""
    return [_shared(stage) for stage in case.evidence.stages if shares_gil(stage) and stage.key not in case.guilty]


def _held(stage: StageEvidence) -> Verdict:
    age = stage.tick_age_s or GIL_AFTER_S
    text = f"{stage.name}: the GIL is held{_by(stage)} for {seconds(age)}; no other thread of it can run"
    return verdict(stage, "gil_held", text, age, [f"main thread in {where(stage)}", *thread_lines(stage)])


def _shared(stage: StageEvidence) -> Verdict:
    gil = stage.gil
    assert gil is not None  # `shares_gil` has looked
    how = "in turns with its other threads" if gil.hold_ms is None else f"{gil.hold_ms:.0f} ms at a time"
    text = f"{stage.name}: the GIL is held{_by(stage)} {percent(gil.share)} of the time, {how}"
    lines = [
        f"its control thread found the GIL held in {percent(gil.share)} of the last {seconds(gil.over_s)}, {how}; "
        "time without a core does not count",
    ]
    if (pace := stage.pace) is not None:
        lines.append(f"own time of a step {pace.step_ms:.1f} ms; like steps took {pace.baseline_ms:.1f} ms here before")
    return verdict(stage, "gil_held", text, gil.over_s, [*lines, *thread_lines(stage)])


def _by(stage: StageEvidence) -> str:
    owner = stage.stack.gil_owner if stage.stack is not None and stage.stack.pid == stage.pid else ""
    return f" by {owner.partition(' at ')[0]}" if owner else ""
