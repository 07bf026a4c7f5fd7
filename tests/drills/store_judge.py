"""Judges of the soak of KV tiers: alarms against the fault that is there, and the sizes of processes."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import defaultdict
from pathlib import Path

from serving import Served
from watching import Watcher

WARM_S = 300.0
"""Seconds after the start of a process from which its growth counts."""
LEAST = 8
"""Least measurements behind a judgement of growth."""
GROWS = {"MiB": (1.25, 8.0), "files": (1.2, 8.0), "threads": (1.01, 0.0)}
"""Most growth of a process: a factor, and what is added to it."""
_NONE = "(?!)"
_TICKS = os.sysconf("SC_CLK_TCK")


class Alarms:
    """Root verdicts: right ones, false ones, and faults that none has named."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._began = time.monotonic()
        self._seen, self._may, self._planted = 0, _NONE, 0.0
        self._named_s: float | None = None
        self._rows: dict[str, list[float | None]] = defaultdict(list)
        self.false: list[str] = []
        """Alarms that are not those of a fault that was there."""
        self.silent: list[str] = []
        """Faults that were owed an alarm and got none."""

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def begin(self, may: str) -> None:
        """Allow the alarms that match `may`, as `cause@stage: summary`."""
        self.judge()
        self._may, self._planted, self._named_s = may, time.monotonic(), None

    def judge(self) -> bool:
        """Judge what was raised since the last call. Returns whether the present fault has been named."""
        news, self._seen = self._watcher.changes[self._seen :], len(self._watcher.changes)
        for seen in news:
            for verdict in seen.verdicts:
                text = f"{verdict.cause}@{verdict.stage}: {verdict.summary}"
                if re.match(self._may, text):
                    self._named_s = seen.at - self._planted if self._named_s is None else self._named_s
                else:
                    self.false.append(f"{self.age:.0f} s {text}")
                    print(f"ALARM {self.false[-1]}", flush=True)
        return self._named_s is not None

    def end(self, name: str, *, owed: bool) -> None:
        """Allow no alarm any more, and note whether the fault `name` was named."""
        self.judge()
        self._rows[name].append(self._named_s)
        if owed and self._named_s is None:
            self.silent.append(f"{self.age:.0f} s {name} was not named")
        self._may = _NONE

    def row(self, name: str) -> str:
        """Return how often a fault was named, and the seconds until then."""
        rows = self._rows[name]
        named = sorted(at for at in rows if at is not None)
        return f"named {len(named)}, median {named[len(named) // 2]:.1f} s, most {named[-1]:.1f} s" if named else "-"


class Sizes:
    """Memory, open files and threads of each process, and bytes in shared memory."""

    def __init__(self, engine: Served) -> None:
        self._engine = engine
        self._sizes: dict[tuple[str, int], list[tuple[float, dict[str, float]]]] = defaultdict(list)
        """By role and pid: seconds of the run, and sizes."""
        self._cpu_s: dict[int, float] = {}

    def measure(self, age: float) -> None:
        """Note all sizes."""
        with contextlib.suppress(AssertionError):
            self._engine.find_pids()
        for role, pid in self._engine.pids.items():
            with contextlib.suppress(OSError):
                folder = Path(f"/proc/{pid}")
                fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                size = {"MiB": int(fields["RssAnon"].split()[0]) / 1024, "threads": float(fields["Threads"]),
                        "files": float(len(list((folder / "fd").iterdir())))}  # fmt: skip
                self._sizes[role, pid].append((age, size))
                user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
                self._cpu_s[pid] = (int(user) + int(system)) / _TICKS
        files = list(Path("/dev/shm").glob(f"*{self._engine.config.id}*/**/*"))
        used = sum(path.stat().st_blocks * 512 for path in files if path.is_file())
        self._sizes["/dev/shm", 0].append((age, {"MiB": used / 2**20, "files": float(len(files))}))

    def cpu_share(self, age: float) -> float:
        """Return the processors that the engine has taken, as far as they were measured."""
        return sum(self._cpu_s.values()) / age

    def grown(self) -> list[str]:
        """Print the sizes of each process that lived for long, in the quarters of its time; return those that grew.

        A restarted process begins small, so it is never compared with the one before it.
        """
        lines = []
        for (role, pid), sizes in sorted(self._sizes.items()):
            warm = [size for at, size in sizes if at >= sizes[0][0] + WARM_S]
            if len(warm) < LEAST:
                continue
            for what, (factor, more) in GROWS.items():
                means = [_mean(warm, what, quarter) for quarter in range(4)]
                print(f"| {role} | {pid} | {what} | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")
                if means[3] > means[0] * factor + more:
                    lines.append(f"{role} {pid}: {means[0]:.1f} > {means[3]:.1f} {what}")
        return lines


def _mean(sizes: list[dict[str, float]], what: str, quarter: int) -> float:
    """Return the mean of a size in a quarter of the measurements."""
    first, last = (len(sizes) * each // 4 for each in (quarter, quarter + 1))
    return sum(size.get(what, 0.0) for size in sizes[first:last]) / (last - first)
