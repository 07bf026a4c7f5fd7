"""The verdict: a pure function of evidence. Missing evidence gives "undetermined", never a guess.

In order: what is dead or stopped is a root by itself; with nothing in flight there is no other fault; a declared
phase inside its budget is work. Otherwise, once no stage has retired anything for longer than the work explains, the
waits are followed from stage to stage to the one that waits for nobody. Stages that only suffer carry `root=False`.
"""

from __future__ import annotations

import signal

import msgspec

from ppengine.monitor.evidence import DriverEvidence, Evidence, StageEvidence
from ppengine.monitor.words import doing, exit_words, seconds
from ppengine.protocol.snapshot import Cause, Verdict

STOPPED_AFTER_S = 0.2
"""State T must be seen twice so far apart: a debugger or a shell may stop a process for a moment."""
STUCK_AFTER_S = 2.0
STUCK_FACTOR = 5.0
UNKNOWN_MS_PER_TOKEN = 10.0
"""Assumed where a stage has no history."""
MEMORY_WORK_S = 10.0
"""Copies, swaps and mapping: their length is not in the tokens."""
ECHO_S = 2.0
SUFFERS_AFTER_S = 0.5
UNSEEN_AFTER_S = 2.0
PHASE_BUDGET_S = {"start": 120.0, "load": 900.0, "profile": 300.0, "capture": 300.0, "compile": 900.0, "closing": 60.0}
_MEMORY_OPS = frozenset({"swap_out", "swap_in", "copy", "map"})
_ECHOES = ("connection closed by peer", "connection reset by peer", "broken pipe")
_WAITS = frozenset({"idle", "receive", "send", "collective", "token_return"})


def diagnose(evidence: Evidence) -> list[Verdict]:
    """Return the findings, roots first, each once; empty when nothing is wrong."""
    deaths = [] if evidence.stopping else _deaths(evidence.stages)
    roots = (
        _driver(evidence.driver, evidence.stopping) + deaths + [_stopped(s) for s in evidence.stages if _is_stopped(s)]
    )
    if not roots:
        roots = _stuck(evidence)
    named = {verdict.stage for verdict in roots}
    suffer = [
        verdict
        for stage in evidence.stages
        if stage.stage not in named and (verdict := _suffering(stage, evidence, roots)) is not None
    ]
    found = sorted(roots, key=lambda verdict: (not verdict.root, -verdict.since_s)) + suffer
    return [_one_line(verdict) for verdict in found]


# --- processes ----------------------------------------------------------------------------------------------


def _deaths(stages: tuple[StageEvidence, ...]) -> list[Verdict]:
    """Return the dead stages. The first death is a root; what it tore along within 2 s is an echo of it.

    Deaths that were seen in one look come in any order: one that blames its peer is no first death.
    """
    dead = [stage for stage in stages if stage.dead_for_s is not None]
    if not dead:
        return []
    first = min((stage for stage in dead if not _blames_peer(stage)), key=_order, default=min(dead, key=_order))
    return [_dead(stage, first if _is_echo(stage, first) else None) for stage in dead]


def _order(stage: StageEvidence) -> float:
    return -(stage.dead_for_s or 0.0)


def _is_echo(stage: StageEvidence, first: StageEvidence) -> bool:
    apart = abs((first.dead_for_s or 0.0) - (stage.dead_for_s or 0.0))
    return stage is not first and apart <= ECHO_S and _blames_peer(stage)


def _blames_peer(stage: StageEvidence) -> bool:
    return any(text in stage.exit_detail.lower() for text in _ECHOES)


def _dead(stage: StageEvidence, echo_of: StageEvidence | None) -> Verdict:
    how = exit_words(stage.exit_code)
    evidence = [f"pid {stage.pid}: {how}"]
    if stage.exit_detail and (stage.exit_code or 0) >= 0:
        evidence.append(f"last words: {stage.exit_detail}")
    if stage.exit_code == -signal.SIGKILL:
        kills = stage.oom_kills
        evidence.append(
            "cgroup oom_kill: not readable"
            if kills is None
            else f"cgroup oom_kill +{kills}"
            if kills
            else "no cgroup OOM"
        )
    if stage.op is not None:
        until_then = max(0.0, (stage.op_age_s or 0.0) - (stage.dead_for_s or 0.0))
        evidence.append(f"was in {doing(msgspec.structs.replace(stage, op_age_s=until_then))}")
    summary = f"stage {stage.stage} {how}"
    if echo_of is not None:
        summary += f" after stage {echo_of.stage} was gone"
    elif stage.exit_detail and (stage.exit_code or 0) > 0:
        summary += f": {stage.exit_detail}"
    return Verdict(
        stage=stage.stage,
        cause="dead",
        summary=summary,
        since_s=stage.dead_for_s or 0.0,
        evidence=evidence,
        suggest=f"ppconsole restart-stage {stage.stage} (or see: ppconsole logs --stage {stage.stage})",
        root=echo_of is None,
    )


def _is_stopped(stage: StageEvidence) -> bool:
    return stage.dead_for_s is None and stage.stopped_for_s is not None and stage.stopped_for_s >= STOPPED_AFTER_S


def _stopped(stage: StageEvidence) -> Verdict:
    since = (stage.stopped_for_s or 0.0) + (stage.sample_age_s or 0.0)
    within = f" in {doing(stage)}" if stage.op not in (None, "idle") else ""
    evidence = [f"pid {stage.pid}: process state T for {seconds(since)}"]
    evidence += [f"open operation: {doing(stage)}"] if stage.op else []
    evidence += [f"holds a step unretired for {seconds(stage.unretired_age_s)}"] if stage.unretired_age_s else []
    return Verdict(
        stage=stage.stage,
        cause="stopped",
        summary=f"stage {stage.stage} is stopped by a signal (pid {stage.pid}, state T){within}",
        since_s=since,
        evidence=evidence,
        suggest=f"ppconsole continue {stage.stage} (or: kill -CONT {stage.pid})",
    )


def _driver(driver: DriverEvidence, stopping: bool) -> list[Verdict]:
    """Return what is wrong with the scheduler's side, if anything."""
    if driver.dead_for_s is not None:
        if stopping:
            return []
        how, since, suggest = exit_words(driver.exit_code), driver.dead_for_s, "ppconsole logs"
    elif driver.stopped_for_s is not None and driver.stopped_for_s >= STOPPED_AFTER_S:
        how, since, suggest = "is stopped by a signal (state T)", driver.stopped_for_s, f"kill -CONT {driver.pid}"
    elif driver.report_age_s is not None and driver.report_age_s > driver.report_limit_s and not stopping:
        how, since = f"has not reported for {seconds(driver.report_age_s)}", driver.report_age_s
        suggest = f"py-spy dump --pid {driver.pid}" if driver.pid else "ppconsole logs"
    else:
        return []
    age = "none yet" if driver.report_age_s is None else f"{seconds(driver.report_age_s)} ago"
    evidence = [
        f"pid {driver.pid or 'unknown'}: process state {driver.process_state or 'unknown'}",
        f"newest report: {age} (limit {seconds(driver.report_limit_s)})",
    ]
    evidence += [f"last words: {driver.exit_detail}"] if driver.exit_detail else []
    summary = f"the engine core (pid {driver.pid or 'unknown'}) {how}"
    return [Verdict(stage=None, cause="driver", summary=summary, since_s=since, evidence=evidence, suggest=suggest)]


# --- work that does not move --------------------------------------------------------------------------------


def _stuck(evidence: Evidence) -> list[Verdict]:
    """Return who holds up the work in flight, once it has stood still for longer than the work explains."""
    over = [stage for stage in evidence.stages if _over_budget(stage)]
    if over:
        return [_slow_phase(stage) for stage in over]
    if any(stage.phase in PHASE_BUDGET_S for stage in evidence.stages):
        return []
    holding = [stage for stage in evidence.stages if stage.unretired_age_s is not None]
    if not evidence.steps_in_flight or not holding:
        return []
    since = max(stage.unretired_age_s or 0.0 for stage in holding)
    if evidence.since_retired_s is not None:
        since = min(since, evidence.since_retired_s)
    limit = stuck_limit_s(evidence.stages)
    if since <= limit:
        return []
    return [_undetermined(evidence, holding, since, limit)]


def stuck_limit_s(stages: tuple[StageEvidence, ...]) -> float:
    """Return how long nothing may retire: max(2 s, 5 x what the step's tokens should take on any stage)."""
    expected = [
        stage.expected_s if stage.expected_s is not None else stage.unretired_tokens * UNKNOWN_MS_PER_TOKEN / 1e3
        for stage in stages
        if stage.unretired_age_s is not None
    ]
    memory_work = any(stage.op in _MEMORY_OPS for stage in stages)
    return max(STUCK_AFTER_S, STUCK_FACTOR * max(expected, default=0.0), MEMORY_WORK_S if memory_work else 0.0)


def _undetermined(evidence: Evidence, holding: list[StageEvidence], since: float, limit: float) -> Verdict:
    """Return the end of the chain of waits, and what is not known about it."""
    first = min(holding, key=lambda stage: (stage.retired_step or 0, stage.stage))
    chain = _chain(first, evidence.stages)
    last = chain[-1]
    lines = [
        f"stage {stage.stage}: {doing(stage)}, process state {stage.process_state or 'unknown'}" for stage in chain
    ]
    lines.append(f"nothing retired for {seconds(since)}; steps in flight {list(evidence.steps_in_flight)}")
    lines.append(f"limit {seconds(limit)} for {max(stage.unretired_tokens for stage in holding)} tokens")
    if last.sample_age_s is None or last.sample_age_s > UNSEEN_AFTER_S:
        age = "never" if last.sample_age_s is None else f"not for {seconds(last.sample_age_s)}"
        text = f"work stands still; stage {last.stage} was {age} sampled"
        lines.append("missing: a fresh sample; does the agent run?")
    elif len(chain) > 1 and _next(last, evidence.stages) in chain:
        ring = " and ".join(f"{part.stage}" for part in chain[chain.index(_next(last, evidence.stages) or last) :])
        text = f"stages {ring} wait for each other"
        lines.append("missing: what was sent and received on each edge")
    elif last.op == "idle":
        text = f"stage {last.stage} waits for a step that the core says it has sent"
        lines.append(f"finished {last.finished_step}, acknowledged {last.retired_step}; missing: where the message is")
    elif last.op in _WAITS:
        text = f"stage {last.stage} is in {doing(last)} and its peer does not wait for it"
        lines.append("missing: what the transport holds")
    else:
        text = f"stage {last.stage} makes no progress in {doing(last)}"
        lines.append("missing: why; its stacks may tell")
    suggest = f"ppconsole stacks --stage {last.stage}"
    return Verdict(stage=last.stage, cause="undetermined", summary=text, since_s=since, evidence=lines, suggest=suggest)


def _next(stage: StageEvidence, stages: tuple[StageEvidence, ...]) -> StageEvidence | None:
    """Return the stage that this one waits for, None if it waits for nobody or that is not known."""
    if stage.op not in ("receive", "send", "token_return", "collective"):
        return None
    peer = stage.op_peer
    if peer is None and stage.op == "token_return":
        peer = len(stages) - 1
    return next((other for other in stages if other.stage == peer and other is not stage), None)


def _chain(first: StageEvidence, stages: tuple[StageEvidence, ...]) -> list[StageEvidence]:
    """Return `first` and whom it waits for, and so on, to the one that waits for nobody, or until it closes."""
    chain = [first]
    while (following := _next(chain[-1], stages)) is not None and following not in chain:
        chain.append(following)
    return chain


def _over_budget(stage: StageEvidence) -> bool:
    budget = PHASE_BUDGET_S.get(stage.phase or "")
    return budget is not None and (stage.phase_age_s or 0.0) > budget and stage.dead_for_s is None


def _slow_phase(stage: StageEvidence) -> Verdict:
    budget, age = PHASE_BUDGET_S[stage.phase or ""], stage.phase_age_s or 0.0
    return Verdict(
        stage=stage.stage,
        cause="undetermined",
        summary=f"stage {stage.stage} is in phase {stage.phase} for {seconds(age)}; its budget is {seconds(budget)}",
        since_s=age - budget,
        evidence=[f"pid {stage.pid}: process state {stage.process_state or 'unknown'}", "missing: why; see its stacks"],
        suggest=f"ppconsole stacks --stage {stage.stage}",
    )


# --- who suffers --------------------------------------------------------------------------------------------


def _suffering(stage: StageEvidence, evidence: Evidence, roots: list[Verdict]) -> Verdict | None:
    """Return `starved` or `blocked` for a stage whose chain of waits leads to a stage with a finding of its own."""
    if stage.dead_for_s is not None or (stage.op_age_s or 0.0) < SUFFERS_AFTER_S:
        return None
    guilty = {verdict.stage for verdict in roots if verdict.root}
    chain = _chain(stage, evidence.stages)
    root = next((other for other in chain[1:] if other.stage in guilty), None)
    if root is None:
        return None
    cause: Cause = "blocked" if stage.op == "send" else "starved"
    direct = chain[1].stage
    via = "" if direct == root.stage else f" through stage {direct}"
    word = "on" if cause == "blocked" else "by"
    return Verdict(
        stage=stage.stage,
        cause=cause,
        summary=f"stage {stage.stage} is {cause} {word} stage {root.stage}{via}: {doing(stage)}",
        since_s=stage.op_age_s or 0.0,
        evidence=[f"{doing(stage)}, process state {stage.process_state or 'unknown'}"],
        suggest=f"see stage {root.stage}",
        root=False,
    )


def _one_line(verdict: Verdict) -> Verdict:
    """Keep the summary to one line of the banner."""
    text = " ".join(verdict.summary.split())
    short = text if len(text) <= 100 else text[:97] + "..."
    return msgspec.structs.replace(verdict, summary=short)
