"""Exhausted limits of the host: descriptors of a process, and free space of the engine's folders."""

from __future__ import annotations

from ppengine.diagnosis.case import Case
from ppengine.diagnosis.evidence import Shortage
from ppengine.protocol.snapshot import Verdict

_NO_STEP = "no step waits for room there; logs, history and journal lack what comes meanwhile"
_REFUSED = "commands without room for their line in the audit log are refused; stop is not"


def short(case: Case) -> list[Verdict]:
    """Return a verdict for each process without descriptors, and one for all full folders."""
    found = [_out_of_files(one) for one in case.evidence.shortages if one.kind == "files"]
    disks = [one for one in case.evidence.shortages if one.kind == "disk"]
    return found + ([_disk_full(disks)] if disks else [])


def _out_of_files(one: Shortage) -> Verdict:
    name = one.where if one.stage is not None else f"the {one.where}"
    return Verdict(
        stage=one.stage,
        rank=one.rank,
        cause="out_of_files",
        subject="" if one.stage is not None else one.where,
        summary=f"{name} has no descriptors left: {one.figure}",
        since_s=one.since_s,
        evidence=[f"pid {one.pid}: {one.figure}", "what it has open stays open; what needs another one is tried again"],
        suggest=f"prlimit --pid {one.pid} --nofile=65536:65536 (and ulimit -n where the engine is started)",
    )


def _disk_full(disks: list[Shortage]) -> Verdict:
    path, _, use = disks[0].where.rstrip(")").rpartition(" (")
    return Verdict(
        stage=None,
        cause="disk_full",
        summary=f"no room in the {use}, {disks[0].figure}: {path}",
        since_s=max(one.since_s for one in disks),
        evidence=[*(f"{one.where}: {one.figure}" for one in disks), _NO_STEP, _REFUSED],
        suggest=f"df {path}; make room there, the engine goes on by itself",
    )
