"""What recording costs: ns a record, and throughput of an engine with it and without, alternating in one run.

`python tests/engine/bench_recorder.py [PROFILE] [PAIRS]`. The engine without it is this one with the writes of records
taken out of its stages when they start; phases, ticks and figures stay.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from ppengine.bench.sides import run_engine
from ppengine.bench.watchers import cpu_seconds, roles_of
from ppengine.bench.workload import Job, random_jobs
from ppengine.config import load_profile
from ppengine.offline.llm import LLM
from ppengine.ring import Kind
from ppengine.stage.recorder import Recorder

OFF = "BENCH_WITHOUT_RECORDS"
SITE = f"""
import os
if os.environ.get("{OFF}"):
    from ppengine.ring import RingWriter
    RingWriter.begin = RingWriter.measured = lambda *_: 0
    RingWriter.returned = RingWriter.end = lambda *_: None
"""


def ns_a_record(folder: Path) -> dict[str, float]:
    """Return the median cost of a whole operation, of one with its host return, and of a `with` block, in ns."""
    ring = Recorder(folder / "r", "main", 0, 0)

    def plain() -> None:
        ring.end(ring.begin(Kind.FORWARD, 7, -1, 64))

    def message() -> None:
        seq = ring.begin(Kind.SEND, 7, 1, 1024, 9, 1 << 24)
        ring.returned(seq)
        ring.end(seq)

    def block() -> None:
        with ring.operation(Kind.FORWARD, 7, size=64):
            pass

    found = {}
    for name, call in (("begin, end", plain), ("begin, returned, end", message), ("with operation()", block)):
        times = []
        for _ in range(15):
            begun = time.thread_time_ns()  # of this thread alone, so that a busy machine may be measured on
            for _ in range(20_000):
                call()
            times.append((time.thread_time_ns() - begun) / 20_000)
        found[name] = statistics.median(times)
    return found


class Side(NamedTuple):
    """One round of one engine: tokens a second, and CPU seconds of core and stages a thousand tokens."""

    rate: float
    cpu: float


def run_side(llm: LLM, jobs: list[Job]) -> Side:
    """Run one round."""
    tokens = sum(job.output_len for job in jobs)
    pids = roles_of(llm.llm_engine.supervisor_pid)["engine"]
    before = sum(map(cpu_seconds, pids))
    seconds = run_engine(llm, jobs)
    return Side(tokens / seconds, (sum(map(cpu_seconds, pids)) - before) * 1000 / tokens)


def throughput(profile: str, pairs: int, folder: Path) -> list[tuple[Side, Side]]:
    """Return (with, without) of each pair of rounds; each pair begins with the other side."""
    (folder / "sitecustomize.py").write_text(SITE)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    with LLM(load_profile(profile, ["name=recorded"])) as recorded:
        os.environ[OFF] = "1"
        with LLM(load_profile(profile, ["name=bare"])) as bare:
            rates: list[tuple[Side, Side]] = []
            for number in range(-1, pairs):
                jobs = random_jobs(512, 32, 16, 64, 48, 0, number + 1)
                sides = (recorded, bare) if number % 2 else (bare, recorded)
                found = {llm: run_side(llm, jobs) for llm in sides}
                if number >= 0:
                    rates.append((found[recorded], found[bare]))
    return rates


def main() -> None:
    """Print both."""
    profile, pairs = (sys.argv[1:] + ["tiny", "10"][len(sys.argv) - 1 :])[:2]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        for what, cost in ns_a_record(Path(name)).items():
            print(f"{what:22s} {cost:6.0f} ns")
        rates = throughput(profile, int(pairs), Path(name))
    for on, off in rates:
        pair = (
            f"{name} {side.rate:7.1f} tok/s, {side.cpu:.3f} CPU s" for name, side in (("with", on), ("without", off))
        )
        print("   ".join(pair))
    for what, ratios in (
        ("tokens/s with / without", sorted(on.rate / off.rate for on, off in rates)),
        ("CPU s a token with / without", sorted(on.cpu / off.cpu for on, off in rates)),
    ):
        print(f"{what}: median {statistics.median(ratios):.3f} (pairs {ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main()
