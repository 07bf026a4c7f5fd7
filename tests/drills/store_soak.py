"""The soak of KV tiers: faults of stores, stages and the core, and verbs, at random under a load that is judged.

    python tests/drills/store_soak.py [--minutes 60] [--seed 0]

One thing happens at a time, with a quiet spell behind it. An alarm is right while a fault that it names is there. Any
other alarm, a wrong token, a request that fails and a process that grows fail the run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent / "end_to_end"), str(HERE.parent / "engine")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from drill import end, tiers  # noqa: E402
from load import Load, learn, profile  # noqa: E402
from ppengine.protocol.snapshot import Snapshot  # noqa: E402
from ppengine.protocol.store_verbs import (  # noqa: E402
    StoreAdd,
    StoreClear,
    StoreDrain,
    StorePause,
    StoreRemove,
    StoreResume,
    StoreTest,
)
from ppengine.protocol.verbs import ClearFaults, Fault, Preempt, SetMemory, SwapOut, Verb  # noqa: E402
from serving import LASTING_S, Served  # noqa: E402
from watching import Watcher, watch  # noqa: E402

STAGES = 2
SPELL_S = (6.0, 14.0)
"""Quiet seconds between two actions."""
KILLS_S = 240.0
"""Least seconds between two kills of stages or cores: after more of them the engine waits for an operator."""
NAMED_S, HEALED_S = 40.0, 90.0
"""Most seconds until a fault is named, and until nothing is said of it any more."""
WARM_S = 300.0
"""Seconds after which growth counts."""
LASTING = ("store-flip", "store-short")
"""Faults that stay in files, which may be read much later."""
GROWS = {"MiB": 1.25, "files": 1.2, "threads": 1.01}
"""Most growth of a process, as a factor."""


class Soak:
    """One engine with its load, and what has been seen."""

    def __init__(self, engine: Served, watcher: Watcher, load: Load, source: random.Random) -> None:
        self.engine, self.watcher, self.load, self.source = engine, watcher, load, source
        self.done, self.named, self.silent = Counter[str](), Counter[str](), Counter[str]()
        self.false: list[str] = []
        self.sizes: dict[str, list[tuple[float, dict[str, float]]]] = defaultdict(list)
        self._began = time.monotonic()
        self._killed = -KILLS_S
        self._allowed: tuple[str, ...] = ()
        self._seen = 0

    def judge(self) -> list[str]:
        """Return the causes that were raised since the last call; those that no fault explains are false alarms."""
        news, self._seen = self.watcher.changes[self._seen :], len(self.watcher.changes)
        causes = [(verdict.cause, verdict.summary) for seen in news for verdict in seen.verdicts]
        for cause, summary in dict(causes).items():
            if cause not in self._allowed and "*" not in self._allowed:
                self.false.append(f"{self.age:.0f} s {cause}: {summary}")
                print(f"ALARM {self.false[-1]}", flush=True)
        return [cause for cause, _ in causes]

    @property
    def age(self) -> float:
        return time.monotonic() - self._began

    def measure(self) -> None:
        """Note the size of each process."""
        with contextlib.suppress(AssertionError):
            self.engine.find_pids()
        for role, pid in self.engine.pids.items():
            with contextlib.suppress(OSError):
                fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
                self.sizes[role].append(
                    (self.age, {
                        "MiB": int(fields["RssAnon"].split()[0]) / 1024, "threads": float(fields["Threads"]),
                        "files": float(len(list(Path(f"/proc/{pid}/fd").iterdir()))),
                    })
                )  # fmt: skip

    async def act(self, name: str, action: Callable[[], Awaitable[bool | None]], allowed: tuple[str, ...]) -> None:
        """Do one thing; `action` says whether an alarm is owed. Then wait until all is well, and a spell longer."""
        print(f"{self.age:6.0f} s  {name}, {self.load.ended} requests ended", flush=True)
        self.judge()
        self._allowed = allowed
        owed = await action()
        raised: list[str] = []
        until = time.monotonic() + NAMED_S
        while owed and time.monotonic() < until and not any(cause in allowed for cause in raised):
            await asyncio.sleep(0.1)
            raised += self.judge()
        await self.watcher.link.command(ClearFaults(), timeout=30)
        if name in LASTING:
            await self.watcher.do(StoreClear(backend="disk"))
        with contextlib.suppress(AssertionError):
            await self.watcher.until(_well, "all is well", HEALED_S)
        raised += self.judge()
        self.done[name] += 1
        if owed:
            (self.named if any(cause in allowed for cause in raised) else self.silent)[name] += 1
        self._allowed = ()
        await asyncio.sleep(self.source.uniform(*SPELL_S))
        self.judge()
        self.measure()

    async def do(self, *verbs: Verb) -> None:
        """Apply verbs, one after another, with a moment between."""
        for verb in verbs:
            await self.watcher.do(verb)
            await asyncio.sleep(self.source.uniform(0.5, 2.0))

    async def fault(self, kind: str, owed: bool) -> bool:
        """Plant a fault in the store of either stage."""
        await self.watcher.do(Fault(kind=kind, stage=self.source.randrange(STAGES)))
        return owed

    async def kill(self, role: str) -> None:
        """Kill a stage or the core, unless that was done a moment ago."""
        if time.monotonic() - self._killed < KILLS_S:
            return
        self._killed = time.monotonic()
        self.engine.find_pids()
        os.kill(self.engine.pids[role], signal.SIGKILL)
        await asyncio.sleep(3.0)

    async def churn(self) -> None:
        """Take blocks from requests, and change the memory."""
        for share in (0.75, 0.85, 0.7, 0.9):
            await self.watcher.do(SetMemory(utilization=share))
            for name in self.load.names[-2:]:
                for verb in (SwapOut(request=name), Preempt(request=name, mode="recompute")):
                    await self.watcher.link.command(verb, timeout=30)  # It may have ended: a refusal is an answer.
            await asyncio.sleep(0.5)

    def actions(self) -> dict[str, tuple[Callable[[], Awaitable[bool | None]], tuple[str, ...]]]:
        """Return everything that may happen, with the causes that may be named."""
        mem = StoreAdd(backend="mem", kind="memory", quota_gib=0.05, write="always")
        faults = {"store-kill": False, "store-stop": True, "store-slow": True, "store-flip": True,
                  "store-short": True, "store-full": True}  # fmt: skip
        verbs: dict[str, list[Verb]] = {
            "pause, resume": [StorePause(backend="disk"), StoreResume(backend="disk")],
            "drain, resume": [StoreDrain(backend="disk"), StoreResume(backend="disk")],
            "add, remove": [mem, StoreTest(backend="mem"), StorePause(backend="disk"), StoreResume(backend="disk"),
                            StoreRemove(backend="mem")],
            "clear": [StoreClear(backend="disk")],
            "test": [StoreTest(backend="disk")],
        }  # fmt: skip
        found: dict[str, tuple[Callable[[], Awaitable[bool | None]], tuple[str, ...]]] = {
            **{kind: (partial(self.fault, kind, owed), ("store",)) for kind, owed in faults.items()},
            **{name: (partial(self.do, *each), ()) for name, each in verbs.items()},
            "memory and preemption": (self.churn, ()),
            "stage killed": (lambda: self.kill(f"stage{self.source.randrange(STAGES)}"), ("*",)),
            "core killed": (lambda: self.kill("core"), ("*",)),
        }  # fmt: skip
        return found

    def grown(self) -> list[str]:
        """Return the processes that have grown since the engine was warm."""
        lines = []
        for role, all_sizes in sorted(self.sizes.items()):
            warm = [size for at, size in all_sizes if at >= WARM_S]
            if len(warm) < 8:
                continue
            first, last = warm[: len(warm) // 4], warm[-(len(warm) // 4) :]
            for what, most in GROWS.items():
                before, after = (sum(size[what] for size in each) / len(each) for each in (first, last))
                print(f"{role:9} {what:8} {before:8.1f} > {after:8.1f}")
                if after > before * most + (8 if what != "threads" else 0):
                    lines.append(f"{role}: {before:.1f} > {after:.1f} {what}")
        return lines


def _well(picture: Snapshot) -> bool:
    """Return whether the engine serves, with its stores, and nothing is said of it."""
    tiers_there = picture.tiers is not None and picture.tiers.ready and not picture.tiers.slots_quarantined
    opened = picture.tiers is not None and all(one.state == "open" for one in picture.tiers.backends)
    return picture.engine.state == "serving" and not picture.verdicts and tiers_there and opened


async def soak(minutes: float, seed: int) -> int:
    """Run; print what was done and what came of it. Returns the exit code."""
    folder, source = tempfile.mkdtemp(prefix="pp-tiers-"), random.Random(seed)
    settings = [*tiers(folder), "memory.utilization=0.9"]
    engine = await asyncio.to_thread(Served, profile(STAGES, *settings), "--allow-faults", step_s=LASTING_S)
    try:
        async with watch(engine.record) as watcher:
            load = Load(watcher, seed=seed, long=True)
            run = Soak(engine, watcher, load, source)
            load.start()
            await asyncio.sleep(20)
            actions = run.actions()
            while run.age < minutes * 60 and not load.errors and not load.wrong:
                name = source.choice(list(actions))
                await run.act(name, *actions[name])
            ended = await load.finish(120)
            run.judge()
            last = await watcher.idle()
            assert last.tiers is not None
            problems = [*load.errors, *(f"wrong tokens: {name}" for name in load.wrong), *run.grown()]
            problems += [] if ended else [f"{len(load.names)} requests have not ended"]
            left = (last.tiers.slots_moving, last.tiers.slots_quarantined, last.tiers.finding, last.tiers.fetching)
            problems += [f"slots moving, quarantined, requests finding, fetching: {left}"] if any(left) else []
    finally:
        await asyncio.to_thread(end, engine)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{run.age / 60:.1f} minutes, {load.ended} requests ended, {load.judged} judged")
    for name, count in sorted(run.done.items()):
        print(f"| {name} | {count} | named {run.named[name]}, not {run.silent[name]} |")
    disk = last.tiers.backends[0]
    print(f"tokens from files {disk.hit_tokens_total}, of {last.tiers.prompt_tokens_total} since the last core;"
          f" corrupt shards {disk.corrupt_total}, failed fetches {last.tiers.failed_fetches_total}")  # fmt: skip
    for title, lines in (("false alarms", run.false), ("problems", problems)):
        print(f"{title}: {len(lines)}", *lines, sep="\n  ")
    return 1 if run.false or problems else 0


def main() -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    learn(long=True)
    return asyncio.run(soak(options.minutes, options.seed))


if __name__ == "__main__":
    sys.exit(main())
