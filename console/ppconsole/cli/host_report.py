"""`explain` where the gateway does not answer: the verdict that an engine's host can give, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.stage_samples import StageSample

from ppconsole.link.engine_host import HostLook, HostProcess, look, processes_of
from ppconsole.model.safe import clean
from ppconsole.model.units import age_text

_BUSY = 0.9
_ONCE = ("gateway", "core", "agent")


def explain(record: EngineRecord, why: str) -> tuple[list[str], dict[str, Any]]:
    """Return the lines of `explain` and its JSON, from the host alone; `why`: how the gateway failed to answer."""
    found = look(record)
    verdicts = _verdicts(found)
    lines = [f"{clean(record.name)} ({record.id}): {clean(why)}; this is from /proc and the rings of this host"]
    for verdict in verdicts:
        lines.append(f"{verdict['summary']}{'; try: ' if verdict['suggest'] else ''}{verdict['suggest']}")
    lines += ["processes:", *_table(found.processes)]
    if found.stages:
        lines += ["stages:", *(f"    {_stage(sample)}" for sample in found.stages)]
    elif found.missing:
        lines.append(f"stages: {clean(found.missing)}")
    lines.append(f"logs: {record.run_dir}")
    document = {
        "fault": True, "engine_state": "unknown", "verdicts": verdicts, "waits": [],
        "processes": [process._asdict() for process in found.processes], "stages": found.stages,
    }  # fmt: skip
    return lines, document


def troubles(processes: Sequence[HostProcess]) -> list[str]:
    """Return a line for each process that is missing, stopped, traced or ended."""
    lines = [f"{process.name} (pid {process.pid}) {process.trouble}" for process in processes if process.trouble]
    there = {process.role for process in processes}
    return lines + [f"{role}: no such process" for role in _ONCE if role not in there]


def _verdicts(found: HostLook) -> list[dict[str, Any]]:
    """Return the troubles as verdicts, that of the gateway first."""
    verdicts = []
    for process in sorted(found.processes, key=lambda process: process.role != "gateway"):
        if process.trouble:
            verdicts.append(
                _verdict(process, f"the {process.name} (pid {process.pid}) {process.trouble}", process.mend)
            )
    gateway = found.process("gateway")
    if gateway is None:
        text = "the gateway has no process: no console can attach"
        verdicts.insert(0, {"role": "gateway", "stage": None, "summary": text, "suggest": ""})
    elif not gateway.trouble:
        doing = f"uses {gateway.cpu:.0%} of a core" if gateway.cpu >= _BUSY else _sleep(gateway)
        text = f"the gateway (pid {gateway.pid}) does not answer: it {doing}"
        verdicts.insert(0, _verdict(gateway, text, f"py-spy dump --pid {gateway.pid}"))
    return verdicts


def held_up(record: EngineRecord) -> list[str]:
    """Return why processes of an engine on this host do not go on, each with the shell line that mends it."""
    return [
        f"the {one.name} (pid {one.pid}) {one.trouble}{f'; try: {one.mend}' if one.mend else ''}"
        for one in processes_of(record)
        if one.trouble
    ]


def _sleep(process: HostProcess) -> str:
    return (
        f"waits in {process.waits_in} (state {process.state})" if process.waits_in else f"is in state {process.state}"
    )


def _verdict(process: HostProcess, summary: str, suggest: str) -> dict[str, Any]:
    return {"role": process.role, "stage": process.stage, "summary": summary, "suggest": suggest}


def _table(processes: Sequence[HostProcess]) -> list[str]:
    return [
        f"    {process.name:<11} pid {process.pid:<8} state {process.state}  {process.cpu:>4.0%} of a core  "
        f"{clean(process.waits_in)}".rstrip()
        for process in processes
    ]


def _stage(sample: StageSample) -> str:
    """Return what a stage does, from its rings."""
    doing = (
        "between two operations"
        if sample.op is None
        else f"in {sample.op} for {age_text((sample.op_age_ms or 0) / 1e3)}"
    )
    step = f", step {sample.op_step}" if sample.op_step else ""
    steps = f"begun {sample.begun_step or 0}, finished {sample.finished_step or 0}"
    return f"stage {sample.index}: {doing}{step}; {steps}; process state {sample.process_state or 'none'}"
