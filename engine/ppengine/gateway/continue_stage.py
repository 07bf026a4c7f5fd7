"""The verb `continue`: SIGCONT to the processes of a stage, by the gateway, because the core may be stuck."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping

from ppengine.common.procfs import read_stat, tracer
from ppengine.protocol.control import Accepted, Command, Outcome, Refused, Reply
from ppengine.protocol.discovery import process_start


def continue_stage(command: Command, op: str, stage: int, found: Mapping[str, tuple[int, int]]) -> Iterator[Reply]:
    """Yield the answers to a command to continue `stage`; act between them.

    `found`: (pid, start time) of its processes by name. If some ranks are stopped, they alone are continued.
    """
    pids = {name: pid for name, (pid, start) in found.items() if process_start(pid) == start}
    if not pids:
        yield Refused(id=command.id, code="NOT_FOUND", text=f"no process of stage {stage} runs on the engine's host")
        return
    chosen = {name: pid for name, pid in pids.items() if _state(pid) in ("T", "t")} or pids
    plan = [_plan(name, pid) for name, pid in chosen.items()]
    if command.dry_run:
        yield Outcome(id=command.id, op=op, state="planned", text="; ".join(plan), plan=plan)
        return
    yield Accepted(id=command.id, op=op, plan=plan)
    try:
        for pid in chosen.values():
            os.kill(pid, signal.SIGCONT)
    except OSError as error:
        yield Outcome(id=command.id, op=op, state="failed", text=f"SIGCONT to pid {pid}: {error.strerror}")
        return
    names = " and ".join(f"{name} (pid {pid})" for name, pid in chosen.items())
    yield Outcome(id=command.id, op=op, state="applied", text=f"sent SIGCONT to {names}")


def _state(pid: int) -> str:
    stat = read_stat(pid)
    return "" if stat is None else stat.state


def _plan(name: str, pid: int) -> str:
    """Return the effect of SIGCONT on the process `pid` of a stage, which may be none."""
    state = _state(pid)
    if state == "t":
        return f"{tracer(pid) or 'a tracer'} holds {name}: SIGCONT changes nothing until it lets go"
    if state != "T":
        return f"{name} is not stopped: SIGCONT changes nothing"
    return f"send SIGCONT to pid {pid} of {name}"
