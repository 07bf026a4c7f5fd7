"""Stages that get too little processor time: by a CPU quota of their cgroup, or on the few cores that they may use.

Before the rules for blocked work: a process that is held back for most of a second looks as if it were blocked.
"""

from __future__ import annotations

from ppengine.diagnosis.budgets import QUOTA_AFTER_S, QUOTA_ALONE_S, QUOTA_GREW, STARVED_AFTER_S, is_lost, is_unseen
from ppengine.diagnosis.case import Case, thread_lines
from ppengine.diagnosis.evidence import StageEvidence
from ppengine.diagnosis.phrases import percent, seconds
from ppengine.protocol.snapshot import Verdict
from ppengine.protocol.stage_samples import QuotaSample, StarvedSample

_FRESH_MS = 3000.0


def throttled(case: Case) -> list[Verdict]:
    """Return the stages that a quota has begun to hold back."""
    return [
        _verdict(stage, stage.quota)
        for stage in case.evidence.stages
        if stage.quota is not None and _is_throttled(stage, stage.quota) and stage.key not in case.guilty
    ]


def starved(case: Case) -> list[Verdict]:
    """Return the stages whose main thread waits for a core while others idle (see `agent/core_watch.py`)."""
    return [
        _starved(stage, stage.starved)
        for stage in case.evidence.stages
        if stage.starved is not None
        and stage.starved.for_ms >= STARVED_AFTER_S * 1e3
        and stage.phase == "serving"
        and _works(stage)
        and not (is_lost(stage) or is_unseen(stage) or stage.key in case.guilty)
    ]


def _works(stage: StageEvidence) -> bool:
    """Return whether a stage has a step, or had one a moment ago: on a busy host the turns of an idle one come late."""
    return stage.unretired_age_s is not None or (stage.pace is not None and stage.pace.age_ms <= _FRESH_MS)


def _is_throttled(stage: StageEvidence, quota: QuotaSample) -> bool:
    if is_lost(stage) or is_unseen(stage) or stage.phase != "serving":
        return False
    if quota.before is not None and quota.share < QUOTA_GREW * quota.before:
        return False
    pace = stage.pace
    judged = pace is not None and pace.age_ms <= _FRESH_MS
    slow = judged and pace is not None and pace.slow_ms > 0
    if judged and not slow:
        return False  # It works as fast as it did.
    return quota.for_ms >= (QUOTA_AFTER_S if slow else QUOTA_ALONE_S) * 1e3


def _verdict(stage: StageEvidence, quota: QuotaSample) -> Verdict:
    since = quota.for_ms / 1e3
    share = percent(quota.share)
    before = "not known" if quota.before is None else percent(quota.before)
    lines = [
        f"held back by its cgroup's cpu quota {share} of the time ({before} before): "
        f"nr_throttled +{quota.nr_throttled}, throttled_usec +{quota.throttled_us} in {seconds(since)}",
        f"{quota.file} allows {quota.cores:.3g} cores",
    ]
    return Verdict(
        stage=stage.stage,
        rank=stage.shown_rank,
        cause="straggler",
        summary=f"{stage.name} is throttled {share} of the time: its cgroup's cpu quota holds it back",
        since_s=since,
        evidence=[*lines, *_pace_lines(stage), *thread_lines(stage)],
        suggest=f"echo {quota.none} > {quota.file}",
    )


def _starved(stage: StageEvidence, found: StarvedSample) -> Verdict:
    since, share = found.for_ms / 1e3, percent(found.share)
    lines = [
        f"its main thread could run and had no core for at least {share} of the last second in which others idled",
        f"so for {seconds(since)}; a full host and a quota do not count",
        *([f"its main thread {found.scheduling}"] if found.scheduling else []),
    ]
    return Verdict(
        stage=stage.stage,
        rank=stage.shown_rank,
        cause="straggler",
        summary=f"{stage.name} is slow: its main thread waits for a core while others idle",
        since_s=since,
        evidence=[*lines, *_pace_lines(stage), *thread_lines(stage)],
        suggest=f"ps -Lo tid,ni,psr,pcpu {stage.pid}; taskset -acp {stage.pid}",
    )


def _pace_lines(stage: StageEvidence) -> list[str]:
    pace = stage.pace
    if pace is None:
        return []
    return [f"own time of a step {pace.step_ms:.1f} ms; like steps took {pace.baseline_ms:.1f} ms here before"]
