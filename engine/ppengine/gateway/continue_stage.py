"""The verb `continue`: SIGCONT to a stage, by the gateway itself, because the core may be stuck."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from ppengine.common.procfs import read_stat, tracer
from ppengine.protocol.control import Accepted, Command, Outcome, Refused, Reply
from ppengine.protocol.discovery import process_start


def continue_stage(command: Command, op: str, stage: int, process: tuple[int, int] | None) -> Iterator[Reply]:
    """Yield the answers to a command to continue `stage`, whose (pid, start time) is `process`; act between them."""
    if process is None or process_start(process[0]) != process[1]:
        yield Refused(id=command.id, code="NOT_FOUND", text=f"no process of stage {stage} runs on the engine's host")
        return
    pid = process[0]
    plan = [_plan(stage, pid)]
    if command.dry_run:
        yield Outcome(id=command.id, op=op, state="planned", text=plan[0], plan=plan)
        return
    yield Accepted(id=command.id, op=op, plan=plan)
    try:
        os.kill(pid, signal.SIGCONT)
    except OSError as error:
        yield Outcome(id=command.id, op=op, state="failed", text=f"SIGCONT to pid {pid}: {error.strerror}")
        return
    yield Outcome(id=command.id, op=op, state="applied", text=f"sent SIGCONT to stage {stage} (pid {pid})")


def _plan(stage: int, pid: int) -> str:
    """Return the effect of SIGCONT on the process `pid` of a stage, which may be none."""
    stat = read_stat(pid)
    state = stat.state if stat is not None else ""
    if state == "t":
        return f"{tracer(pid) or 'a tracer'} holds stage {stage}: SIGCONT changes nothing until it lets go"
    if state != "T":
        return f"stage {stage} is not stopped: SIGCONT changes nothing"
    return f"send SIGCONT to pid {pid} of stage {stage}"
