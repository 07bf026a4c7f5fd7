"""Ends of processes: dead, killed for memory, crashed, out of memory by their own report, cut off, stopped.

The first death is the root; deaths within two seconds after it are its consequences.
"""

from __future__ import annotations

import re
import signal
from pathlib import PurePath

import msgspec

from ppengine.common.oom_kills import OOM_KILLER
from ppengine.diagnosis.budgets import is_lost, is_stopped, is_unseen
from ppengine.diagnosis.case import Case
from ppengine.diagnosis.device_evidence import device_lines
from ppengine.diagnosis.evidence import Key, StageEvidence
from ppengine.diagnosis.finding_rules import verdict_of
from ppengine.diagnosis.phrases import doing, exit_words, let_go, seconds, thaw
from ppengine.diagnosis.signal_senders import cpu_limit_s, lift_cpu_limit, sender
from ppengine.protocol.reports import NODE_LOST, UNKNOWN_STATUS
from ppengine.protocol.snapshot import Cause, Verdict
from ppengine.protocol.stage_samples import TRACED

ECHO_S = 2.0
STATUS_WITHIN_S = 0.5
"""The supervisor reports an exit status within one turn; a death is named with it, or without it after this long."""
_ECHOES = ("connection closed by peer", "connection reset by peer", "broken pipe", "lost stage ")
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
_OUT_OF_MEMORY = re.compile(
    r"out[ _]of[ _]memory|outofmemory|memoryerror|not enough memory|"
    r"(can't|cannot|could not) allocate memory|does not fit",
    re.IGNORECASE,
)
_SHORT: dict[Cause, re.Pattern[str]] = {
    "out_of_files": re.compile(r"too many open files|no descriptors? left|errno 2[34]\b", re.IGNORECASE),
    "disk_full": re.compile(r"no space left on device|disk quota exceeded|errno 28\b", re.IGNORECASE),
}
_NOT_OF_ITS_OWN = (None, -signal.SIGKILL, UNKNOWN_STATUS)
_NO_STATUS = (UNKNOWN_STATUS, NODE_LOST)
"""Statuses with which the out-of-memory killer may have been at work; of much memory the end itself takes seconds."""
_BREAKS = ("stream_owner", "stream_order")
_LOST_PEER = re.compile(r"lost stage (\d+)(?: rank (\d+))?")
_NO_WORDS = re.compile(r"exit code -?\d+|killed by SIG\w+|")


def ended(case: Case) -> list[Verdict]:
    """Return the stages that are dead or have said that they cannot go on.

    Deaths that were seen in one look come in any order: one that blames its peer is no first death.
    """
    if case.evidence.stopping:
        return []
    lost = [
        stage
        for stage in case.evidence.stages
        if is_lost(stage) and not _status_is_coming(stage) and not _may_be_an_echo(case, stage)
    ]
    if not lost:
        return []
    first = min(lost, key=lambda stage: (_blames_peer(stage), -_since(stage)))
    return [_verdict(case, stage, _cause_of(case, stage, first)) for stage in lost]


def stopped(case: Case) -> list[Verdict]:
    """Return the stages that a signal, a tracer or a cgroup has stopped."""
    return [_stopped(stage) for stage in case.evidence.stages if is_stopped(stage) and not is_lost(stage)]


def _lost_peer(stage: StageEvidence) -> Key | None:
    """Return the place whose connection closed, by a stage's own words; without a rank it is that of its own."""
    found = _LOST_PEER.search(f"{stage.lost} {stage.exit_detail}")
    return (int(found[1]), stage.rank if found[2] is None else int(found[2])) if found else None


def _status_is_coming(stage: StageEvidence) -> bool:
    """Return whether the process has just gone and its parent has not yet said how, which makes the cause."""
    return stage.exit_code is None and stage.dead_for_s is not None and stage.dead_for_s < STATUS_WITHIN_S


def _may_be_an_echo(case: Case, stage: StageEvidence) -> bool:
    """Return whether a stage blames a peer whose own end may not have been seen yet."""
    peer = _lost_peer(stage)
    known = peer is None or any(other.key == peer and is_lost(other) for other in case.evidence.stages)
    return not known and _since(stage) < ECHO_S


def _since(stage: StageEvidence) -> float:
    return max(stage.dead_for_s or 0.0, stage.lost_for_s or 0.0)


def _last_words(stage: StageEvidence) -> str:
    told = stage.exit_detail
    if (stage.exit_code or 0) < 0:
        told = told.partition(": ")[2]  # Behind the signal: what was thrown.
    words = stage.lost or told
    return "" if _NO_WORDS.fullmatch(words) else words


def _blames_peer(stage: StageEvidence) -> bool:
    return any(text in f"{stage.lost} {stage.exit_detail}".lower() for text in _ECHOES)


def _cause_of(case: Case, stage: StageEvidence, first: StageEvidence) -> str:
    """Return what an end is the echo of, empty if it is one of its own."""
    for verdict in case.found:
        # Who was sent the wrong message dies of it; who sent it is named.
        reported = (edge for edge in stage.edges if edge.kind == "receive" and edge.peer == verdict.stage)
        if verdict.cause == "mismatch" and verdict.rank in (None, stage.rank) and any(reported):
            return f"after the mismatch of {stage.name_of(verdict.stage or 0)}"
    near = abs(_since(first) - _since(stage)) <= ECHO_S
    return f"after {first.name} was gone" if stage is not first and near and _blames_peer(stage) else ""


def _crashed(stage: StageEvidence) -> bool:
    """Return whether a signal of its own making ended a process."""
    return stage.exit_code is not None and -stage.exit_code in _CRASHES


def _cause(stage: StageEvidence) -> Cause:
    code, words = stage.exit_code, _last_words(stage)
    counted = stage.oom_kills or OOM_KILLER in stage.exit_detail
    if stage.dead_for_s is not None and code in _NOT_OF_ITS_OWN and counted:
        return "killed_oom"
    if code == -signal.SIGKILL:
        return "dead"
    if _lost_peer(stage) is not None and (code is None or code >= 0):
        return "link"  # Its peer lives, or this would be an echo.
    if words and _OUT_OF_MEMORY.search(words):
        return "out_of_memory"
    for cause, pattern in _SHORT.items():
        if words and pattern.search(words):
            return cause
    if _crashed(stage) or (words and code not in _NO_STATUS and not _blames_peer(stage)):
        return "crashed"
    return "dead"


_SUMMARIES: dict[Cause, str] = {"killed_oom": " by the out-of-memory killer", "dead": "", "crashed": ""}


def _verdict(case: Case, stage: StageEvidence, echo: str) -> Verdict:
    cause, words = _cause(stage), _last_words(stage)
    if echo and cause == "link":
        cause = "starved" if stage.dead_for_s is None else "dead"
    how = exit_words(stage.exit_code) if stage.dead_for_s is not None else "cannot go on"
    named = "" if OOM_KILLER in words else _SUMMARIES.get(cause, "")
    summary = f"{stage.name} {how}{named}"
    by = sender(stage) if cause == "dead" and stage.dead_for_s is not None else ""
    if echo:
        summary += f" {echo}"
    elif short := sender(stage, short=True) if by else "":
        summary += f": {short}"
    elif words:
        summary += f": {words}"
    evidence = [f"pid {stage.pid or 'unknown'}: {how}"]
    evidence += [f"sent by: {by}"] if by else []
    if words:
        evidence.append(f"last words: {words}")
    if stage.dead_for_s is not None and stage.exit_code in _NOT_OF_ITS_OWN:
        evidence += _oom_lines(stage)
    if stage.phase not in (None, "serving"):
        evidence.append(f"in phase {stage.phase}")
    if stage.op is not None and stage.dead_for_s is not None:
        until_then = max(0.0, (stage.op_age_s or 0.0) - _since(stage))
        evidence.append(f"was in {doing(msgspec.structs.replace(stage, op_age_s=until_then))}")
    evidence += device_lines(stage)
    verdict = Verdict(
        stage=stage.stage,
        rank=stage.shown_rank,
        cause=cause,
        summary=summary,
        since_s=_since(stage),
        evidence=evidence,
        suggest=_suggest(stage, cause),
        root=not echo,
    )
    broken = cause == "crashed" and not echo and (_crashed(stage) or "CUDA" in words)
    return _explained(stage, verdict) if broken else verdict


def _oom_lines(stage: StageEvidence) -> list[str]:
    """Return the line on kills by the cgroup's limit; none where the process's parent has counted one already."""
    kills = stage.oom_kills
    if kills:
        return [f"cgroup oom_kill +{kills}"]
    if OOM_KILLER in stage.exit_detail:
        return []
    return ["cgroup oom_kill: not readable" if kills is None else "no cgroup OOM"]


def _explained(stage: StageEvidence, crash: Verdict) -> Verdict:
    """Return the verdict of a crash with the stream findings before it, if there are any.

    An illegal access is the end of work on a wrong stream, and does not show whose work it was.
    """
    broken = [finding for finding in stage.findings if finding.cause in _BREAKS]
    if not broken:
        return crash
    why = verdict_of(broken)
    return msgspec.structs.replace(
        crash,
        cause=why.cause,
        summary=f"{stage.name} crashed: {why.summary.removeprefix(f'stage {stage.stage}: ')}",
        evidence=[*why.evidence, *crash.evidence],
        suggest=f"{why.suggest}; {crash.suggest}",
    )


def _suggest(stage: StageEvidence, cause: Cause) -> str:
    logs = f"ppconsole logs --stage {stage.stage}"
    if cause in ("killed_oom", "out_of_memory"):
        return f"{logs}; then less memory: ppconsole set-memory, or scheduler.max_num_batched_tokens"
    if cause in _SHORT:
        what = "make room on the disk" if cause == "disk_full" else "raise RLIMIT_NOFILE (prlimit, ulimit -n)"
        return f"{logs}; {what}: the stage is tried again by itself"
    if cause == "dead" and cpu_limit_s(stage) is not None:
        return lift_cpu_limit(stage)
    if stage.exit_code == NODE_LOST:
        return "ray status (Ray places the stage on another node; STRICT_SPREAD needs a free one)"
    if stage.successor is not None:
        phase = f" in phase {stage.successor_phase}" if stage.successor_phase else ""
        return f"{logs} (pid {stage.successor} takes its place{phase})"
    return f"ppconsole restart-stage {stage.stage} (or see: {logs})"


def _stopped(stage: StageEvidence) -> Verdict:
    since, unseen = (stage.stopped_for_s or 0.0) + (stage.state_age_s or 0.0), is_unseen(stage)
    within = f" in {doing(stage)}" if stage.op not in (None, "idle") and not unseen else ""
    state = TRACED if stage.process_state == TRACED else "T"
    evidence = [f"pid {stage.pid}: process state {state} for {seconds(since)}"]
    if unseen:
        evidence.append(f"missing: a sample of this moment; the newest is {seconds(stage.sample_age_s)} old")
    elif stage.op:
        evidence.append(f"open operation: {doing(stage)}")
    evidence += [f"holds a step unretired for {seconds(stage.unretired_age_s)}"] if stage.unretired_age_s else []
    by = f"a signal (pid {stage.pid}, state T)"
    suggest = f"ppconsole continue {stage.stage} (or: kill -CONT {stage.pid})"
    if state == TRACED:
        # SIGCONT does not reach whom a debugger has.
        by = f"its tracer {stage.tracer}, state t" if stage.tracer else "a tracer (state t)"
        suggest = let_go(stage.tracer)
    elif stage.frozen:
        # To the kernel it sleeps, and no signal wakes it.
        evidence[0] = f"pid {stage.pid}: frozen for {seconds(since)}, process state {stage.process_state}"
        evidence.append(f"{stage.frozen} freezes its cgroup; signals wait until it is thawed")
        by, suggest = f"its cgroup, which is frozen ({PurePath(stage.frozen).parent})", thaw(stage.frozen)
    return Verdict(
        stage=stage.stage,
        rank=stage.shown_rank,
        cause="stopped",
        summary=f"{stage.name} is stopped by {by}{within}",
        since_s=since,
        evidence=evidence,
        suggest=suggest,
    )
