"""What recording costs: ns a record, and throughput and CPU time of one engine with it and without, in turn.

`python tests/engine/bench_recorder.py [PROFILE] [PAIRS]`. Between two rounds a signal has the stages drop records,
or write them again; phases, ticks and figures stay. Two engines would not do: of two alike one takes 1 to 2 % more.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench_watchers import roles_of
from ppengine.bench.sides import run_engine
from ppengine.bench.workload import random_jobs
from ppengine.common.config import EngineConfig, load_profile
from ppengine.common.ring import Kind, RingReader, Word
from ppengine.offline.llm import LLM
from ppengine.stage.recorder import Recorder

TOGGLE = signal.SIGRTMIN + 5
SITE = """
import signal

NAMES = "begin", "end", "part", "end_part"

def toggle(*_):
    from ppengine.common.ring import RingWriter as Writer
    kept = toggle.kept
    toggle.kept = {} if kept else {name: getattr(Writer, name) for name in NAMES}
    for name in NAMES:
        setattr(Writer, name, kept[name] if kept else lambda *_, **__: 0)

toggle.kept = {}
signal.signal(signal.SIGRTMIN + 5, toggle)
"""


def ns_a_record(folder: Path) -> dict[str, float]:
    """Return the median cost of each way to record an operation, in ns."""
    ring = Recorder(folder / "r", "main", 0, 0)

    def plain() -> None:
        ring.end(ring.begin(Kind.FORWARD, 7, -1, 64))

    def part() -> None:
        ring.part(Kind.FORWARD, 7, size=64)

    def message() -> None:
        now_ns = time.monotonic_ns()
        ring.end(ring.begin(Kind.RECEIVE, 7, 1, 1024, 9, 1 << 24, now_ns, now_ns))

    def block() -> None:
        with ring.operation(Kind.FORWARD, 7, size=64):
            pass

    found = {}
    for name, call in {
        "begin, end": plain, "part after part": part, "message, posted and done": message, "with operation()": block,
    }.items():  # fmt: skip
        times = []
        for _ in range(15):
            begun = time.thread_time_ns()  # of this thread alone, so that a busy machine may be measured on
            for _ in range(20_000):
                call()
            times.append((time.thread_time_ns() - begun) / 20_000)
        found[name] = statistics.median(times)
    return found


class Side(NamedTuple):
    """One round: tokens a second, and CPU ns a token of engine (core, stages) and agent."""

    rate: float
    engine: float
    agent: float


def cpu_ns(pids: list[int]) -> int:
    """Return the CPU time so far of all threads of these processes."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


def rounds(profile: str, pairs: int, folder: Path) -> list[tuple[Side, Side]]:
    """Return (with, without) of each pair of rounds; each pair begins with the side on which the one before ended."""
    (folder / "sitecustomize.py").write_text(SITE)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    with LLM(load_profile(profile, ["name=recorder"])) as llm:
        config = EngineConfig.load(Path(llm.llm_engine.run_dir) / "engine.json")
        paths = [Path(config.ring_dir) / f"s{stage}.0.main.ring" for stage in range(config.stages)]
        rings = [RingReader(path) for path in paths]
        roles = roles_of(llm.llm_engine.supervisor_pid)
        agents = [pid for pid in roles["watchers"] if b"ppengine.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        heads = {True: 0, False: 0}

        def run(number: int, records: bool) -> Side:
            jobs = random_jobs(512, 32, 16, 64, 48, 0, number)
            tokens = sum(job.output_len for job in jobs)
            before = [cpu_ns(pids) for pids in (roles["engine"], agents)]
            head = sum(ring.word(Word.HEAD) for ring in rings)
            seconds = run_engine(llm, jobs)
            heads[records] += sum(ring.word(Word.HEAD) for ring in rings) - head
            after = [cpu_ns(pids) for pids in (roles["engine"], agents)]
            return Side(tokens / seconds, *((new - old) / tokens for new, old in zip(after, before, strict=True)))

        def toggle() -> None:
            for ring in rings:
                os.kill(ring.word(Word.PID), TOGGLE)
            time.sleep(0.05)

        run(0, True)
        found, records = [], True
        for number in range(1, 2 * pairs, 2):
            first = run(number, records)
            toggle()
            records = not records
            second = run(number + 1, records)
            found.append((second, first) if records else (first, second))
        if not heads[True] or heads[False]:
            raise RuntimeError(f"{heads[True]} records were written with, {heads[False]} without: the signal was lost")
    return found


def main() -> None:
    """Print both."""
    profile, pairs = (sys.argv[1:] + ["tiny", "100"][len(sys.argv) - 1 :])[:2]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        for what, cost in ns_a_record(Path(name)).items():
            print(f"{what:24s} {cost:6.0f} ns")
        found = rounds(profile, max(2, int(pairs)), Path(name))
    for field, unit in (("rate", "tokens/s"), ("engine", "CPU ns a token")):
        sides = [(getattr(on, field), getattr(off, field)) for on, off in found]
        ratios = [math.log(on / off) for on, off in sides]
        mean, error = statistics.mean(ratios), statistics.stdev(ratios) / math.sqrt(len(ratios))
        on, off = (statistics.median(side) for side in zip(*sides, strict=True))
        print(
            f"{unit:16s} with {on:8.0f}, without {off:8.0f}: ratio {math.exp(mean):.4f} +- {error:.4f}, "
            f"median {math.exp(statistics.median(ratios)):.4f}"
        )
    # Some rounds are over before it looks.
    on, off = (statistics.mean(side.agent for side in sides) for sides in zip(*found, strict=True))
    print(f"of the agent     with {on:8.0f}, without {off:8.0f}")


if __name__ == "__main__":
    main()
