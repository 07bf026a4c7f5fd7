"""An engine as its host knows it: processes from /proc, stages from their rings. It needs no answer of the engine."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.stage_samples import AgentReport, StageSample

_MODULES = {
    "ppengine.supervisor": "supervisor", "ppengine.gateway": "gateway", "ppengine.core": "core",
    "ppengine.agent": "agent", "ppengine.stage.worker": "stage", "ppengine.shadow": "shadow",
    "ppengine.templates": "templates", "ppengine.grammar": "grammar", "ppengine.texts": "texts",
    "ppengine.http": "http", "ppengine.store": "store",
    "ppengine.supervisor.launch.forkserver": "forkserver", "ppengine.supervisor.launch.ray_driver": "ray",
}  # fmt: skip
_LOOK_S = 10.0
_APART_S = 0.3
_TICKS = 100.0
"""Clock ticks a second in /proc/PID/stat; Linux reports them so on every architecture."""


class HostProcess(NamedTuple):
    """One process of an engine. `state`: the kernel's letter; `cpu`: share of a core in the last moment."""

    pid: int
    role: str
    stage: int | None
    state: str
    tracer: str
    waits_in: str
    """Kernel function in which its main thread sleeps; empty if it does not, or the kernel does not say."""
    cpu: float

    @property
    def name(self) -> str:
        """Role, with the number of a stage."""
        return self.role if self.stage is None else f"{self.role} {self.stage}"

    @property
    def trouble(self) -> str:
        """Why it makes no progress, as far as its state shows; empty if it does not show that."""
        if self.state == "t":
            return f"is held by a tracer{f', {self.tracer}' if self.tracer else ''} (state t)"
        return {"T": "is stopped by a signal (state T)", "Z": "has ended (state Z)", "X": "has ended (state X)"}.get(
            self.state, ""
        )

    @property
    def mend(self) -> str:
        """Shell line that mends the trouble; empty if there is none."""
        return f"kill -CONT {self.pid}" if self.state == "T" else ""


@dataclass(frozen=True, slots=True)
class HostLook:
    """Processes of an engine in the order of a pipeline, and its stages; `missing`: why there are no stages."""

    processes: list[HostProcess]
    stages: list[StageSample]
    missing: str = ""

    def process(self, role: str) -> HostProcess | None:
        """Return the process of a role that an engine has once."""
        return next((process for process in self.processes if process.role == role), None)


def look(record: EngineRecord) -> HostLook:
    """Return the processes and stages of an engine on this host. Takes about a second."""
    processes = processes_of(record)
    supervisor = _words(record.pid)
    if not supervisor:
        return HostLook(processes, [], "its supervisor has ended")
    # The engine's own Python: this one may have no engine installed.
    command = [supervisor[0], "-m", "ppengine.agent.host_look", "--engine", f"{record.run_dir}/engine.json"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_LOOK_S, check=True)
        return HostLook(processes, msgspec.json.decode(done.stdout, type=AgentReport).stages)
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    except (OSError, subprocess.TimeoutExpired, msgspec.MsgspecError) as error:
        why = str(error)
    return HostLook(processes, [], f"the rings cannot be read: {why}")


def processes_of(record: EngineRecord) -> list[HostProcess]:
    """Return the supervisor of an engine and its descendants that are processes of ours."""
    pids = [record.pid, *_descendants(record.pid)]
    before, begun = {pid: _stat(pid) for pid in pids}, time.monotonic()
    time.sleep(_APART_S)
    found, order = [], list(_MODULES.values())
    for pid in pids:
        words, stat, old = _words(pid), _stat(pid), before[pid]
        kind = next((_MODULES[word] for word in words if word in _MODULES), "")
        if stat is None or not kind:
            continue
        role = words[words.index("--role") + 1] if "--role" in words[:-1] else kind
        cpu = 0.0 if old is None else (stat[1] - old[1]) / _TICKS / (time.monotonic() - begun)
        stage = int(words[words.index("--stage") + 1]) if role == "stage" and "--stage" in words[:-1] else None
        process = HostProcess(pid, role, stage, stat[0], _tracer(pid), _wchan(pid), round(cpu, 2))
        found.append((order.index(kind), stage or 0, process))
    return [process for *_, process in sorted(found, key=lambda each: each[:2])]


def _descendants(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _read(path).split()):
            yield child
            yield from _descendants(child)


def _words(pid: int) -> list[str]:
    """Return the command line; that of a forked stage is one text, as its title was set."""
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").split()


def _stat(pid: int) -> tuple[str, int] | None:
    """Return state letter and processor time in ticks."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (fields[0], int(fields[11]) + int(fields[12])) if fields else None


def _tracer(pid: int) -> str:
    for line in _read(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("TracerPid:") and (tracer := line.split()[1]) != "0":
            return f"{_read(Path(f'/proc/{tracer}/comm')).strip()} (pid {tracer})"
    return ""


def _wchan(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/wchan")).strip("0\n")


def _read(path: Path) -> str:
    """Return the text of a file of the kernel; empty if the process is gone, or another user's."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")  # the kernel cuts a process's name also inside a character
    return ""
