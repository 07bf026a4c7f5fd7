"""How much of two processes that hand work to each other a third one leaves, by its priority and pauses.

python tests/engine/bench_yielding.py [--rounds 8] [--others 0.5]

The two are as stages of a pipeline with two micro-batches in flight: each works a millisecond and hands over. All three
are in sessions of their own, as processes of an engine. On two cores the third one has no core to itself. A window
beside which other work takes more than `--others` processors does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from bench_http import cpu_s
from bench_long_prompt import busy_s, until_quiet

STAGE = """
import os, sys, time
take, give, begins = map(int, sys.argv[1:])
os.write(give, b"xx" if begins else b"")
while os.read(take, 1):
    end = time.thread_time() + 0.001
    while time.thread_time() < end:
        pass
    os.write(give, b"x")
"""
WORKER = """
import os, sys, time
from pathlib import Path
nice, idle, part_s, pause_s = int(sys.argv[1]), sys.argv[2] == "idle", *map(float, sys.argv[3:]),
os.setpriority(os.PRIO_PROCESS, 0, nice)
Path("/proc/self/autogroup").write_text(str(nice))
if idle:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print(flush=True)
while True:
    end = time.thread_time() + part_s
    while time.thread_time() < end:
        pass
    if pause_s:
        time.sleep(pause_s)
"""
WINDOW_S = 0.4


@dataclass(frozen=True)
class Kind:
    """One way of the third process. Without a part it is not there."""

    words: str
    nice: int = 0
    policy: str = "usual"
    part_ms: float = 0.0
    pause_ms: float = 0.0


KINDS = (
    Kind("not there"),
    Kind("usual priority", part_ms=1),
    Kind("nice 10", 10, part_ms=1),
    Kind("nice 10, pauses", 10, part_ms=1, pause_ms=0.3),
    Kind("idle, pauses", 0, "idle", 1, 0.3),
    Kind("nice 10, idle", 10, "idle", 1),
    Kind("nice 10, idle, pauses", 10, "idle", 1, 0.3),
    Kind("nice 10, idle, long parts", 10, "idle", 2, 0.3),
    Kind("nice 10, idle, short parts", 10, "idle", 0.5, 0.1),
)


def waited_s(pid: int) -> float:
    """Return the seconds so far in which a process could run and had no processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def window(stages: list[int], kind: Kind) -> tuple[float, float, float, float]:
    """Return shares of a window: work and waits of the stages, work of the third process, and other work."""
    with contextlib.ExitStack() as stack:
        pids = list(stages)
        if kind.part_ms:
            words = [str(kind.nice), kind.policy, str(kind.part_ms / 1e3), str(kind.pause_ms / 1e3)]
            third = subprocess.Popen(
                [sys.executable, "-c", WORKER, *words], stdout=subprocess.PIPE, start_new_session=True
            )
            stack.enter_context(third)
            stack.callback(third.kill)
            assert third.stdout is not None
            third.stdout.readline()
            pids.append(third.pid)
        begun, busy = time.monotonic(), busy_s()
        cpu, waits = list(map(cpu_s, pids)), list(map(waited_s, stages))
        time.sleep(WINDOW_S)
        used = [cpu_s(pid) - before for pid, before in zip(pids, cpu, strict=True)]
        waited = sum(waited_s(pid) - before for pid, before in zip(stages, waits, strict=True))
        sums = sum(used[:2]), waited, sum(used[2:]), busy_s() - busy - sum(used)
        took = time.monotonic() - begun
    return sums[0] / took, sums[1] / took, sums[2] / took, sums[3] / took


def main() -> None:
    """Measure all kinds in turn, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--others", type=float, default=0.5)
    options = parser.parse_args()
    there, back = os.pipe(), os.pipe()
    found = defaultdict[str, list[tuple[float, ...]]](list)
    with contextlib.ExitStack() as stack:
        stages = []
        for take, give, begins in ((there[0], back[1], "1"), (back[0], there[1], "0")):
            words = [sys.executable, "-c", STAGE, str(take), str(give), begins]
            stages.append(stack.enter_context(subprocess.Popen(words, pass_fds=(take, give), start_new_session=True)))
            stack.callback(stages[-1].kill)
        for _ in range(options.rounds):
            for kind in KINDS:
                while True:
                    for stage in stages:
                        stage.send_signal(signal.SIGSTOP)
                    until_quiet(options.others)
                    for stage in stages:
                        stage.send_signal(signal.SIGCONT)
                    *shares, others = window([stage.pid for stage in stages], kind)
                    if others <= options.others:
                        break
                found[kind.words].append(tuple(shares))
    for words, all_shares in found.items():
        work, waits, third = map(statistics.median, zip(*all_shares, strict=True))
        print(f"{words:28} work of the two {work:.2f}, their waits {waits:.2f}, work of the third {third:.2f}")


if __name__ == "__main__":
    main()
