"""Senders of the signal that ended a stage: the kernel at a limit, or a process of its user or of root."""

from __future__ import annotations

import signal

from ppengine.common.child_process import signal_name
from ppengine.diagnosis.evidence import StageEvidence

_NEAR_S = 2.0
"""Seconds of CPU time between the newest sample and an end at the limit."""
_EXPECTED = frozenset({signal.SIGKILL, signal.SIGTERM})
"""Signals by which processes are ended as a rule: the summary needs no sender."""


def cpu_limit_s(stage: StageEvidence) -> int | None:
    """Return the limit of CPU time in seconds at which the kernel killed a stage; None: none did."""
    soft, hard = stage.cpu_limits_s
    if stage.exit_code == -signal.SIGXCPU:
        return soft or hard or 0
    # The kernel sends SIGKILL at the hard limit, which `ulimit -t` sets as well.
    at_limit = hard is not None and stage.cpu_s is not None and stage.cpu_s >= hard - _NEAR_S
    return hard if stage.exit_code == -signal.SIGKILL and at_limit and not stage.oom_kills else None


def sender(stage: StageEvidence, *, short: bool = False) -> str:
    """Return who can have sent the signal; empty if no signal ended the stage. `short`: as the summary needs it."""
    number = -(stage.exit_code or 0)
    if number <= 0:
        return ""
    if (limit := cpu_limit_s(stage)) is not None:
        of = f" of {limit} s" if limit else ""
        used = f", used {stage.cpu_s:.1f} s at the newest sample" if stage.cpu_s is not None and not short else ""
        return f"the kernel, at its limit of CPU time{of} (ulimit -t){used}"
    if short and number in _EXPECTED:
        return ""
    return f"any process of its user or of root can send {signal_name(number)}"


def lift_cpu_limit(stage: StageEvidence) -> str:
    """Return the command against a limit of CPU time: for the process that takes the place, and for the next start."""
    start = "start the engine after: ulimit -t unlimited"
    return start if stage.successor is None else f"prlimit --pid {stage.successor} --cpu=unlimited ({start})"
