"""Faults of the engine core: dead, stopped, silent, or not scheduling. And a silent head of Ray."""

from __future__ import annotations

from pathlib import PurePath

from ppengine.common.oom_kills import OOM_KILLER
from ppengine.diagnosis.budgets import HELD_S, STOPPED_AFTER_S, TRACED_AFTER_S, UNSCHEDULED_AFTER_S
from ppengine.diagnosis.case import Case
from ppengine.diagnosis.phrases import code_line, exit_words, let_go, line_words, percent, seconds, stack_lines, thaw
from ppengine.protocol.reports import HeldTurns
from ppengine.protocol.snapshot import Verdict
from ppengine.protocol.stage_samples import TRACED


def core(case: Case) -> list[Verdict]:
    """Return the verdict on the engine core, if there is one."""
    core, stopping, stack = case.evidence.core, case.evidence.stopping, list[str]()
    line = code_line(core)
    if core.dead_for_s is not None:
        if stopping:
            return []
        how, since, suggest = exit_words(core.exit_code), core.dead_for_s, "ppconsole logs"
        if OOM_KILLER in core.exit_detail:
            how, suggest = f"{how}: {core.exit_detail.partition(': ')[2]}", "ppconsole logs; then more memory for it"
    elif core.frozen and (core.stopped_for_s or 0.0) >= STOPPED_AFTER_S:
        how, since = f"is frozen by its cgroup ({PurePath(core.frozen).parent})", core.stopped_for_s or 0.0
        suggest = thaw(core.frozen)
    elif core.process_state == TRACED and (core.stopped_for_s or 0.0) >= TRACED_AFTER_S:
        how, since = f"is stopped by {core.tracer or 'a tracer'} (state t)", core.stopped_for_s or 0.0
        suggest = let_go(core.tracer)
    elif core.process_state != TRACED and core.stopped_for_s is not None and core.stopped_for_s >= STOPPED_AFTER_S:
        how, since, suggest = "is stopped by a signal (state T)", core.stopped_for_s, f"kill -CONT {core.pid}"
    elif stopping:
        return []
    elif core.report_age_s is not None and core.report_age_s > core.report_limit_s:
        how, since = f"has not reported for {seconds(core.report_age_s)}", core.report_age_s
        suggest, stack = "ppconsole stacks --core", stack_lines(core)
    elif core.held is not None and core.held.held_s >= HELD_S:
        how, since, line = _held_words(core.held), core.held_for_s, line_words(core.held.frames)
        suggest, stack = "ppconsole stacks --core", _held_lines(core.held)
    elif core.unscheduled_for_s is not None and core.unscheduled_for_s >= UNSCHEDULED_AFTER_S:
        how, since = f"schedules nothing for {core.running} running requests", core.unscheduled_for_s
        suggest, stack = "ppconsole stacks --core", stack_lines(core)
    else:
        return []
    age = "none yet" if core.report_age_s is None else f"{seconds(core.report_age_s)} ago"
    evidence = [
        f"pid {core.pid or 'unknown'}: process state {core.process_state or 'unknown'}",
        f"newest report: {age} (limit {seconds(core.report_limit_s)})",
    ]
    evidence += [f"last words: {core.exit_detail}"] if core.exit_detail else []
    evidence += stack
    name = "the engine core" if core.role == "core" else "the supervisor"
    summary = f"{name} {how}{line}" if stack and line else f"{name} (pid {core.pid or 'unknown'}) {how}"
    summary += "" if core.role == "core" else ": all processes of the engine ended with it"
    return [Verdict(stage=None, cause="core", summary=summary, since_s=since, evidence=evidence, suggest=suggest)]


def _held_words(held: HeldTurns) -> str:
    """Return how long the turns of the core hold it."""
    does = "computes" if 2 * held.ran_s > held.held_s else "waits"
    return f"{does} in its turns for {percent(held.held_s / held.window_s)} of the time"


def _held_lines(held: HeldTurns) -> list[str]:
    """Return the figures and the stack of long turns."""
    many = f"{held.turns} long turns" if held.turns > 1 else "a long turn"
    took = f"{seconds(held.held_s)} of the last {seconds(held.window_s)}"
    return [
        f"{many} took {took}, the longest {seconds(held.longest_s)}; no step and no answer leaves the core in one",
        f"it computed for {seconds(held.ran_s)} of them, and was in calls that block for the rest",
        f"main thread at {' < '.join(held.frames)}" if held.frames else "missing: the stack",
    ]


def ray_head(case: Case) -> list[Verdict]:
    """Return a verdict on the head of Ray's cluster, if it is silent."""
    if case.evidence.silent_head is None or case.evidence.stopping:
        return []
    words, since = case.evidence.silent_head
    return [
        Verdict(
            stage=None,
            cause="link",
            summary=words,
            since_s=since,
            evidence=[
                "stages and requests go on; a stage that ends now waits for the head",
                "the engine ends when Ray gives up: 60 s, or RAY_gcs_rpc_server_reconnect_timeout_s",
            ],
            suggest="start Ray's head again, or another engine on another cluster",
        )
    ]
