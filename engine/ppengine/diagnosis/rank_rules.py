"""Ranks of one stage: collectives that differ, were left out or are not delivered, and the waits of ranks.

A late, dead or stopped rank is named by the rules for processes and paces, as every stage is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ppengine.diagnosis.case import Case, thread_lines
from ppengine.diagnosis.evidence import StageEvidence
from ppengine.diagnosis.phrases import percent, seconds
from ppengine.diagnosis.wait_graph import Wait, collective_text
from ppengine.protocol.snapshot import Verdict

_DIFFER = re.compile(
    r"stage \d+ rank (\d+) launched ([\w-]+) (\d+) \((.+)\), rank (\d+) launched ([\w-]+) \d+ \((.+)\): it is the first"
    r" difference(, found behind the launch)?"
)
"""The last words of both ranks, see `stage.rank_calls.differ`."""


def differing(case: Case) -> list[Verdict]:
    """Return the stages whose ranks launched different collectives: one verdict for all ranks of the stage."""
    if case.evidence.stopping:
        return []
    found: dict[int, Verdict] = {}
    for stage in case.evidence.stages:
        match = _DIFFER.search(f"{stage.lost} {stage.exit_detail}") if stage.ranks > 1 else None
        if match is not None and stage.stage not in found:
            found[stage.stage] = _differs(stage, match)
    return list(found.values())


def _differs(stage: StageEvidence, match: re.Match[str]) -> Verdict:
    number = match[3]
    sides = sorted([(int(match[1]), match[2], match[4]), (int(match[5]), match[6], match[7])])
    names, sites = {name for _, name, _ in sides}, {where.partition(",")[0] for *_, where in sides}
    at = [_at(side, kind=len(names) > 1, size=len(names) == len(sites) == 1) for side in sides]
    compared = "before they acknowledge a step, so none of its tokens was sent"
    if match[8] is None:
        compared = "before they add, so no sum was wrong"
    return Verdict(
        stage=stage.stage,
        cause="mismatch",
        summary=f"mismatch in stage {stage.stage} at call {number}: {at[0]}, {at[1]}",
        since_s=max(stage.lost_for_s or 0.0, stage.dead_for_s or 0.0),
        evidence=[
            *(f"rank {rank} launched {name} {number} ({where})" for rank, name, where in sides),
            f"it is the first difference: the ranks compare every call {compared}",
        ],
        suggest=f"ppconsole logs --stage {stage.stage}; ppconsole restart-stage {stage.stage} restarts all its ranks",
    )


def _at(side: tuple[int, str, str], *, kind: bool, size: bool) -> str:
    """Return `rank 0 in MLP of layer 3`, with kind or size of the call where that is the difference."""
    rank, name, where = side
    site, _, rest = where.partition(", ")
    return f"rank {rank} in " + (f"{name} of " if kind else "") + site + (f" ({rest})" if size else "")


def left_out(case: Case, chain: Sequence[Wait]) -> Wait | None:
    """Return the wait in a collective for a rank that has finished the step without it."""
    for wait in chain:
        if wait.rank and wait.known and wait.step and (case.at(wait.on).finished_step or 0) >= wait.step:
            return wait
    return None


def undelivered(case: Case, cycle: Sequence[Wait], since: float) -> Verdict | None:
    """Return the verdict on ranks of which each waits for the part of another: all have sent theirs before."""
    if not cycle or not all(wait.rank for wait in cycle):
        return None
    inside = sorted((case.at(wait.waiter) for wait in cycle), key=lambda stage: stage.rank)
    first = inside[0]
    names = " and ".join(str(stage.rank) for stage in inside)
    lines = [f"{wait.waiter} waits for {wait.on}: {wait.text} for {seconds(wait.since_s)}" for wait in cycle]
    lines.append("a rank sends its part before it waits, so the parts are sent and not delivered")
    for stage in inside:
        lines += [f"{stage.name}: {line}" for line in thread_lines(stage)]
    return Verdict(
        stage=first.stage,
        cause="link",
        summary=f"stage {first.stage}: ranks {names} wait for each other in {collective_text(first)}",
        since_s=since,
        evidence=lines,
        suggest=f"ppconsole restart-stage {first.stage} (all its ranks; they connect again)",
    )


def rank_lines(case: Case, stage: StageEvidence) -> list[str]:
    """Return for how long the ranks of a stage waited for each other; the one that is late waits least."""
    known = [other for other in case.evidence.stages if other.stage == stage.stage and other.rank_wait is not None]
    if stage.ranks == 1 or not known:
        return []
    shares = ", ".join(f"rank {other.rank} {percent(other.rank_wait or 0.0)}" for other in known)
    return [f"waits for other ranks, of the last second: {shares}"]
