"""A look at the stages' processes by the gateway itself, while the agent is silent: the kernel's state, no rings."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from ppengine.common import procfs
from ppengine.common.cgroup_limits import frozen_by
from ppengine.diagnosis.evidence import Key
from ppengine.diagnosis.process_history import Glance, Sighting
from ppengine.diagnosis.tracker import newest_process
from ppengine.protocol.reports import ProcessInfo
from ppengine.protocol.stage_samples import TRACED

AGENT_SILENT_S = 2.0


def glanced(sightings: Mapping[Key, Sighting], now_ns: int) -> dict[Key, Sighting]:
    """Return the sightings, with the kernel state of stages of this host at which the agent no longer looks."""
    late_ns = now_ns - int(AGENT_SILENT_S * 1e9)
    return {
        key: replace(seen, glance=_glance(seen.sample.pid, now_ns)) if seen.here and seen.mono_ns < late_ns else seen
        for key, seen in sightings.items()
    }


def silent_agent(listed: list[ProcessInfo]) -> tuple[int, str | None] | None:
    """Return pid and state letter of the agent, if it runs."""
    process = newest_process(listed, "agent")
    if process is None or process.exit_code is not None:
        return None
    stat = procfs.read_stat(process.pid)
    return process.pid, stat.state if stat else None


def _glance(pid: int, now_ns: int) -> Glance:
    stat = procfs.read_stat(pid)
    if stat is None or stat.exiting:
        return Glance(now_ns, None if stat is None else "X")
    tracer = procfs.tracer(pid) if stat.state == TRACED else None
    return Glance(now_ns, stat.state, procfs.wchan(pid), tracer, str(frozen_by(procfs.cgroups(pid)) or ""))
