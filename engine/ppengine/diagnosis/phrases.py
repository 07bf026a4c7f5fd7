"""Evidence in words: exit statuses, what a stage is doing, how long."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.common.child_process import signal_name
from ppengine.diagnosis.evidence import CoreEvidence, StageEvidence
from ppengine.protocol.operation_kinds import RANK_WAIT_WORDS
from ppengine.protocol.reports import NODE_LOST, UNKNOWN_STATUS


def exit_words(code: int | None) -> str:
    """Return an exit status in words; None: the process is gone and its parent has not said how."""
    if code is None:
        return "is gone (exit status not known yet)"
    if code == NODE_LOST:
        return "is lost with its node"
    if code == UNKNOWN_STATUS:
        return "has ended; its exit status is unknown"
    return f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"


def doing(stage: StageEvidence) -> str:
    """Return `receive from 1 m7 for 3.2s`."""
    if stage.op is None:
        return "no open operation"
    peer, op = "", "no room to send" if stage.op == "room" else stage.op
    if stage.op in RANK_WAIT_WORDS:
        peer = f" with rank {stage.op_peer}"
    elif stage.op_peer is not None:
        peer = f" {'to' if stage.op in ('room', 'send') else 'from'} {stage.op_peer}"
    step = f" m{stage.op_step}" if stage.op_step else ""
    return f"{op}{peer}{step}" + (f" for {seconds(stage.op_age_s)}" if stage.op_age_s is not None else "")


def where(stage: StageEvidence) -> str:
    """Return the place in a step where a stage is: its open operation, or what it is past."""
    if stage.op not in (None, "step"):
        return doing(stage)
    step = f" of m{stage.op_step}" if stage.op_step else ""
    after = f" after {stage.last_op}" if stage.last_op else " between operations"
    age = f" for {seconds(stage.op_age_s)}" if stage.op_age_s is not None else ""
    return f"its own code{after}{step}{age}"


def seconds(value: float | None) -> str:
    """Return `3.2s`."""
    return "unknown" if value is None else f"{value:.1f}s" if value < 100 else f"{value:.0f}s"


def duration(value: float) -> str:
    """Return `45s`, `3m12`, `1h05`."""
    whole = round(value)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m{rest:02}" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}"


def percent(share: float) -> str:
    """Return `73 %`."""
    return f"{share * 100:.0f} %"


def rate_text(rate: float) -> str:
    """Return bytes a second, as `1.2 MB/s`."""
    for unit, size in (("B/s", 1.0), ("kB/s", 1e3), ("MB/s", 1e6)):
        if rate < 1000 * size:
            return f"{rate / size:.3g} {unit}"
    return f"{rate / 1e9:.3g} GB/s"


def let_go(tracer: str | None) -> str:
    """Return what to do about a process that a tracer has stopped: no signal of ours reaches it."""
    return f"let the process go on in {tracer or 'the debugger that traces it'}, or detach that"


def thaw(file: str) -> str:
    """Return the command that thaws a cgroup, by the file that froze it: `cgroup.freeze`, or `freezer.state` of v1."""
    return f"echo {'0' if file.endswith('cgroup.freeze') else 'THAWED'} > {file}"


def code_line(of: StageEvidence | CoreEvidence) -> str:
    """Return the innermost line of the engine's own code in the main thread; empty until its stack is taken."""
    stack = of.stack
    return line_words(stack.main) if stack is not None and stack.pid == of.pid else ""


def line_words(frames: Sequence[str]) -> str:
    """Return the newest frame of the engine's own code, without folders; of others if there is none, or empty."""
    if not frames:
        return ""
    own = (frame for mark in ("ppengine/", "ppkernels/", ".py:") for frame in frames if mark in frame)
    function, _, place = next(own, frames[0]).rpartition(" ")
    return f", at {function} {place.rpartition('/')[2]}"


def stack_lines(of: StageEvidence | CoreEvidence) -> list[str]:
    """Return the newest frames of the main thread and of the GIL's owner, once they are taken."""
    stack = of.stack
    if stack is None or stack.pid != of.pid:
        return []
    lines = [f"main thread at {' < '.join(stack.main)}"] if stack.main else []
    lines += [f"GIL owner: {stack.gil_owner}"] if stack.gil_owner else []
    return lines or [f"missing: stacks ({stack.error or 'none came'})"]
