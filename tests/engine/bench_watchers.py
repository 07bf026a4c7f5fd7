"""Measure the cost of consoles: throughput and CPU seconds with consoles on pseudo-terminals, and without.

python tests/engine/bench_watchers.py tiny --pairs 10 --consoles 1
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import pty
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ppengine.bench.sides import run_engine
from ppengine.bench.workload import Job, random_jobs
from ppengine.checkpoint.model_spec import read_spec
from ppengine.common.config import load_profile
from ppengine.offline.llm import LLM

WINDOW_S = 5.0
"""Least time of each side of a pair: several pictures of a console that draws once a second."""
TICKS = os.sysconf("SC_CLK_TCK")
SETTLE_S, SETTLED_S = 20.0, 0.5
"""How long a console may take to come up, and how long it must have been calm."""


class AttachedConsole:
    """A console of this engine on a terminal of 160 x 48, drawing once a second, while the block lasts.

    `cores`: those that it may use; None: all.
    """

    def __init__(self, engine_id: str, cores: set[int] | None = None) -> None:
        self._engine_id, self._cores = engine_id, cores

    def __enter__(self) -> AttachedConsole:
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "48"}
        command = [sys.executable, "-m", "ppconsole", "attach", self._engine_id, "--read-only"]
        self._process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
        )
        os.close(theirs)
        # A process of its own: threads of this one would take turns with the client of the engine.
        self._terminal = subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(ours)
        if self._cores is not None:
            for process in (self._process, self._terminal):
                os.sched_setaffinity(process.pid, self._cores)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._terminal.terminate()
        self._terminal.wait()

    def settle(self) -> None:
        """Wait until the console has loaded and drawn, so that its start is not taken for its watching."""
        used, until = cpu_seconds(self.pid), time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            time.sleep(SETTLED_S)
            before, used = used, cpu_seconds(self.pid)
            if before and used - before < SETTLED_S / 5:
                return

    @property
    def pid(self) -> int:
        """Process id of the console."""
        return self._process.pid


def keep_apart(pids: list[int]) -> set[int]:
    """Keep all threads of `pids` to the lower half of the cores that this process may use; return the upper half."""
    cores = sorted(os.sched_getaffinity(0))
    lower, upper = set(cores[: len(cores) // 2]), set(cores[len(cores) // 2 :])
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), lower)
    return upper


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process so far; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def roles_of(supervisor: int) -> dict[str, list[int]]:
    """Return the pids of an engine's processes by what they are: `engine` (core, stages) and `watchers`."""
    roles: dict[str, list[int]] = {"engine": [], "watchers": []}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            words = path.with_name("cmdline").read_bytes().replace(b"\0", b" ").split()
        except OSError:
            continue
        if int(fields[1]) != supervisor:
            continue
        module = next((word.decode() for word in words if word.startswith(b"ppengine.")), "")
        kind = "watchers" if module.startswith(("ppengine.agent", "ppengine.gateway")) else "engine"
        roles[kind].append(int(path.parent.name))
    return roles


def run_for(llm: LLM, work: Iterator[list[Job]], seconds: float = WINDOW_S) -> float:
    """Return tokens a second of one workload after the other for at least `seconds`."""
    tokens = took = 0.0
    while took < seconds:
        jobs = next(work)
        tokens += sum(job.output_len for job in jobs)
        took += run_engine(llm, jobs)
    return tokens / took


def with_watchers(llm: LLM, work: Iterator[list[Job]], pairs: int, consoles: int, apart: bool) -> None:
    """Alternate runs with and without consoles and print both ratios."""
    roles = roles_of(llm.llm_engine.supervisor_pid)
    cores = keep_apart([os.getpid(), *roles["engine"], *roles["watchers"]]) if apart else None
    alone, watched, shares = [], [], []
    for number in range(pairs):
        # Each pair begins with the other side, so that a drift of the machine favours neither.
        for attached in (False, True) if number % 2 else (True, False):
            if not attached:
                alone.append(run_for(llm, work))
                continue
            with contextlib.ExitStack() as stack:
                several = [
                    stack.enter_context(AttachedConsole(llm.llm_engine.engine_id, cores)) for _ in range(consoles)
                ]
                for console in several:
                    console.settle()
                watchers = [*roles["watchers"], *(console.pid for console in several)]
                before = sum(map(cpu_seconds, roles["engine"])), sum(map(cpu_seconds, watchers))
                watched.append(run_for(llm, work))
                engine = sum(map(cpu_seconds, roles["engine"])) - before[0]
                shares.append((sum(map(cpu_seconds, watchers)) - before[1]) / max(engine, 1e-9))
        print(
            f"pair {number}: {alone[-1]:.1f} alone, {watched[-1]:.1f} watched, CPU share {shares[-1]:.4f}", flush=True
        )
    ratios = sorted(w / a for w, a in zip(watched, alone, strict=True))
    where = f", on cores {sorted(cores)} of their own" if cores else ""
    print(f"{consoles} console{'s' * (consoles > 1)}{where}")
    print(f"throughput with / without:        median {statistics.median(ratios):.3f}", end=" ")
    print(f"(pairs {ratios[0]:.3f} to {ratios[-1]:.3f})")
    print(f"watchers' CPU s per engine CPU s: median {statistics.median(shares):.4f} (max {max(shares):.4f})")


def main() -> None:
    """Measure one profile."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--consoles", type=int, default=1)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt-len", type=int, nargs=2, default=(16, 128), metavar=("LO", "HI"))
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--apart", action="store_true", help="consoles on half of the cores, the engine on the others")
    arguments = parser.parse_args()
    profile = load_profile(arguments.profile)
    vocab = read_spec(Path(profile.model.path)).vocab_size
    fixed = vocab, arguments.requests, *arguments.prompt_len, arguments.output_len, 0
    work = (random_jobs(*fixed, number) for number in itertools.count())
    with LLM(profile) as llm:
        run_engine(llm, next(work))
        with_watchers(llm, work, arguments.pairs, arguments.consoles, arguments.apart)


if __name__ == "__main__":
    main()
