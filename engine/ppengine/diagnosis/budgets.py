"""How long things may take before they count as a fault, and what makes an observation good enough to judge by."""

from __future__ import annotations

from ppengine.diagnosis.evidence import StageEvidence
from ppengine.protocol.stage_samples import TRACED, CpuShares

STOPPED_AFTER_S = 0.2
"""State T must be seen twice so far apart: a debugger or a shell may stop a process for a moment."""
TRACED_AFTER_S = 0.7
"""A profiler pauses a process for less; an idle main loop and a held GIL are judged later."""
STUCK_AFTER_S, STUCK_FACTOR, LOOKING_S = 2.0, 5.0, 0.65
"""Budget of a hang: named within max(2 s, 5 x the expected time), less the time of sampling and reporting."""
LEAST_LIMIT_MS = (STUCK_AFTER_S - LOOKING_S) * 1e3
"""Limit of a hang for the shortest work."""
MOVED_S = 0.2
"""An operation younger than this is not stuck: the reports of the core are as old."""
QUOTA_AFTER_S, QUOTA_ALONE_S, QUOTA_GREW = 2.0, 5.0, 2.0
"""Seconds for which a quota must hold a slower stage back, or one whose pace is not known, and the factor by which it
must do so more than before: a container's own quota is as it always was."""
HELD_BACK = 0.05
"""Share of a second from which a quota that holds a process back is what makes it slow."""
NEIGHBOUR_USES = 0.1
"""Share of a card's SMs from which a process of others explains a stage that is slower than it was."""
UNKNOWN_MS_PER_TOKEN = 10.0
"""Assumed where a stage has no history."""
SLOWEST_COPY, SLOWEST_MAP = 500e6, 10e9
"""Bytes a second that a copy or swap makes at least: the length of memory work is not in the tokens."""
GIL_AFTER_S = 1.25
"""Shorter than the limit of the threads that wait for the holder, so that the cause is reported, not a consequence."""
GIL_SHARE = 0.25
"""Share of the time from which a held GIL slows a stage down, though it is free again and again."""
GIL_COMPUTES = 0.5
"""Least processor time of all other threads, in that of the main one, if one of them takes turns with it."""
SAME_MOMENT_S = 0.5
"""A held GIL stops main loop and control thread at once, within the precision of their ticks."""
CONTROL_GONE_S = 3.0
IDLE_TURN_S = 1.25
"""The main loop turns ten times a second while it is idle."""
SPINS = 0.5
"""Share of a second from which a thread that runs, or would if it had a core, does not merely wait."""
LEAST_SHARE = 0.1
"""Work takes longer where a thread gets no core; no more than ten times is granted."""
UNSEEN_AFTER_S = 2.0
SUFFERS_AFTER_S = 0.5
STRAGGLER_AFTER_S = 6.0
"""A straggler must be named within 10 s; a judged second begins and ends between two samples."""
SLOW_AFTER_S = 4.5
"""The same for one at twice its usual time or more, which noise does not explain; a held GIL is known before."""
STARVED_AFTER_S = 4.0
"""Seconds in which a main thread waits for a core while others idle, before it is named."""
LINK_AFTER_S = 3.0
"""Seconds in which a link is slow before it is named: a message that the host delays is one, and soon over."""
LINK_WAITS_S = 6.0
"""Seconds in which a slow link is not named because another one loses more and is not slow for long enough yet."""
UNSCHEDULED_AFTER_S = 3.0
HELD_S = 2.0
"""Seconds of the newest four in long turns of the core, from which it is held: no stage gets a step in one."""
HEALED_TOLD_S = 5.0
"""A broken wire is reported this long after all stages have met again. Healing takes less than a second, and an
operator needs time to read the verdict."""
HELPER_SILENT_S, HELPER_STARTS_S = 5.0, 60.0
"""Seconds without the report that a process beside the pipeline sends each second, and without its first one."""
HELPER_OWES_S = 3.0
"""Seconds for which the core waits for a grammar process, which it ends after ten. Most answers take milliseconds."""
STORE_GONE_S = 1.0
"""A store that ends is restarted before this, and no fault."""
STORE_SILENT_S, STORE_IDLE_SILENT_S = 1.5, 3.0
"""Seconds without the figures that a store sends twice a second: while it owes answers, and while it owes none."""
STORE_SETTLES_S = 2.0
"""Seconds of a store that began in which its silence is not judged."""
STORE_ABSENT_S = 30.0
STORE_SLOW_S = 1.5
"""Age of a job from which the backend behind it is slow. Beside a `store clear` of many files one took a second."""
CORRUPT_TOLD_S = 30.0
"""Wrong bytes of a backend are reported this long after the newest."""
FAILING_LEAST, FAILING_TOLD_S = 5, 4.0
"""Least calls of a backend that fail in a window, and the time for which they are reported after the newest."""
TIER_WINDOW_S = 60.0
QUOTA_FULL, CHURN_LEAST = 0.95, 60
"""Least used share of its quota, and shards deleted in a window without a hit, from which a backend churns."""
PHASE_BUDGET_S = {
    "start": 120.0, "load": 900.0, "profile": 300.0, "capture": 300.0, "compile": 900.0, "meet": 10.0, "closing": 60.0,
}  # fmt: skip
_SLEEPS = {
    "receive": ("poll",), "token_return": ("poll",), "room": ("futex", "poll"),
    "all_reduce": ("poll",), "all_gather": ("poll",),
}  # fmt: skip
_ANY_SLEEP = ("",)


def stuck_limit_s(stages: tuple[StageEvidence, ...]) -> float:
    """Return how long nothing may retire: by the work that is held and how busy the host is."""
    expected = [_expected_s(stage) for stage in stages if stage.unretired_age_s is not None]
    return _limit_s(max(expected, default=0.0))


def step_limit_ms(history: list[tuple[int, float]], tokens: int) -> float:
    """Return the limit of a hang for a step of `tokens`, by the stage's own history alone."""
    known = expected_ms(history, tokens)
    return _limit_s(_known_s(None if known is None else known / 1e3, tokens)) * 1e3


def _limit_s(expected_s: float) -> float:
    return max(STUCK_AFTER_S, STUCK_FACTOR * expected_s) - LOOKING_S


def _known_s(expected_s: float | None, tokens: int) -> float:
    return tokens * UNKNOWN_MS_PER_TOKEN / 1e3 if expected_s is None else expected_s


def _expected_s(stage: StageEvidence) -> float:
    expected = _known_s(stage.expected_s, stage.unretired_tokens)
    # The whole step's, whatever it is at: the time runs over all of it.
    expected += stage.unretired_moved / SLOWEST_COPY + stage.mapping_bytes / SLOWEST_MAP
    waited = stage.cpu.main_waited or 0.0 if stage.cpu is not None else 0.0
    return expected / max(LEAST_SHARE, 1.0 - waited)


def mapping_hangs(stage: StageEvidence) -> bool:
    """Return whether a thread that maps memory does not end while the stage's steps do, or while it has none.

    If its steps are blocked too, the same cause may block the thread.
    """
    if is_lost(stage) or is_stopped(stage) or is_unseen(stage) or stage.mapping_age_s is None:
        return False
    limit = _limit_s(stage.mapping_bytes / SLOWEST_MAP)
    return stage.mapping_age_s > limit >= (stage.unretired_age_s or 0.0)


def wants_core(cpu: CpuShares) -> float:
    """Return the share of the last second in which the main thread ran or could have run."""
    return cpu.main_user + cpu.main_system + (cpu.main_waited or 0.0)


def really_waits(stage: StageEvidence) -> bool:
    """Return whether a stage whose open operation is a wait may be in it, by where its main thread is.

    A thread waits in a poll for a message and for room on the wire, and in a futex for room behind the send thread.
    A thread that spins, or sleeps elsewhere, is in code of its own between two records.
    """
    if stage.cpu is not None and wants_core(stage.cpu) >= SPINS:
        return False
    if stage.op == "send":
        return False  # The kernel takes it at once; what it does not take is waited for in `room`.
    if stage.op == "room" and "futex" in (stage.wchan or ""):
        return bool(stage.outbox)
    return not stage.wchan or any(name in stage.wchan for name in _SLEEPS.get(stage.op or "", _ANY_SLEEP))


def idles_in_vain(stage: StageEvidence) -> bool:
    """Return whether the main loop has stopped turning although it is idle, while the process gets its turns."""
    if is_lost(stage) or is_stopped(stage) or is_unseen(stage) or stage.phase != "serving" or stage.op != "idle":
        return False
    ticks = stage.tick_age_s is not None and stage.tick_age_s < IDLE_TURN_S / 2
    return ticks and (stage.progress_age_s or 0.0) - (stage.sample_age_s or 0.0) >= IDLE_TURN_S


def is_unseen(stage: StageEvidence) -> bool:
    """Return whether the newest sample of a stage is too old to judge it."""
    return stage.sample_age_s is None or stage.sample_age_s > UNSEEN_AFTER_S


def is_stopped(stage: StageEvidence) -> bool:
    """Return whether a stage is stopped by a signal, seen twice, or by a debugger."""
    after_s = TRACED_AFTER_S if stage.process_state == TRACED else STOPPED_AFTER_S
    return stage.dead_for_s is None and stage.stopped_for_s is not None and stage.stopped_for_s >= after_s


def is_lost(stage: StageEvidence) -> bool:
    """Return whether a stage is dead, or has said that it cannot go on."""
    return stage.dead_for_s is not None or bool(stage.lost)


def holds_gil(stage: StageEvidence) -> bool:
    """Return whether a thread of a live stage keeps the GIL: neither control thread nor main loop go on, seen twice."""
    moved = _moved_s(stage)
    return _ticks_late(stage, GIL_AFTER_S) and (moved is None or moved >= (stage.tick_age_s or 0.0) - SAME_MOMENT_S)


def shares_gil(stage: StageEvidence) -> bool:
    """Return whether a thread of a live stage holds the GIL for much of the time. A quota looks the same."""
    if is_lost(stage) or is_stopped(stage) or is_unseen(stage) or stage.phase != "serving" or stage.quota is not None:
        return False
    if stage.gil is None or stage.gil.share < GIL_SHARE:
        return False
    cpu = stage.cpu
    if stage.gil.hold_ms is not None or cpu is None:
        return True
    # A main thread that computes in Python all the time takes turns, too, with the probe alone.
    main = cpu.main_user + cpu.main_system
    return cpu.user + cpu.system - main >= GIL_COMPUTES * main


def control_is_gone(stage: StageEvidence) -> bool:
    """Return whether a live stage's control thread has not ticked for long, and its main loop goes on."""
    moved = _moved_s(stage)
    return _ticks_late(stage, CONTROL_GONE_S) and moved is not None and moved < SAME_MOMENT_S


def _moved_s(stage: StageEvidence) -> float | None:
    """Return the seconds without a turn of the main loop at the newest sample; None: not known."""
    return None if stage.progress_age_s is None else stage.progress_age_s - (stage.sample_age_s or 0.0)


def _ticks_late(stage: StageEvidence, limit: float) -> bool:
    """Return whether the control thread of a live stage has not ticked for so long, seen twice."""
    if is_lost(stage) or is_stopped(stage) or is_unseen(stage) or stage.phase != "serving":
        return False
    if stage.process_state in ("T", "D", "Z", "X", None) or (stage.tick_stale_for_s or 0.0) < STOPPED_AFTER_S:
        return False
    return (stage.tick_age_s or 0.0) >= limit and not stage.tick_without_core


def expected_ms(history: list[tuple[int, float]], tokens: int) -> float | None:
    """Return how long a step of `tokens` should take by a stage's own history; None without one.

    Between two known sizes on the line from one to the other: behind a decode and the largest chunk lies all else.
    """
    before: tuple[int, float] | None = None
    for size, took in history:
        if size >= tokens:
            if before is None:
                return took
            return before[1] + max(0.0, took - before[1]) * (tokens - before[0]) / (size - before[0])
        before = size, took
    return None if before is None else before[1] * tokens / before[0]
