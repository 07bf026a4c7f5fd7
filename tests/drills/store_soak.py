"""The soak of KV tiers: faults of stores, stages and the core, and verbs, at random under a load that is judged.

    python tests/drills/store_soak.py [--minutes 60] [--seed 0] [--only NAMES]

One thing happens at a time, with a quiet spell behind it. An alarm is right while the fault is there whose cause and
place it names. Any other alarm fails the run, and so does a fault that is not named, a wrong token, a request that
fails, an engine that does not come back to idle, and a process that grows.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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
from ppengine.protocol.verbs import Abort, ClearFaults, Fault, Preempt, SetMemory, SwapOut, Verb  # noqa: E402
from serving import LASTING_S, Served  # noqa: E402
from store_judge import Alarms, Sizes  # noqa: E402
from watching import Watcher, watch  # noqa: E402

STAGES = 2
SPELL_S = (6.0, 14.0)
"""Quiet seconds between two actions."""
KILLS_S = 240.0
"""Least seconds between two kills of stages or cores: after more of them the engine waits for an operator."""
NAMED_S, HEALED_S = 40.0, 90.0
"""Most seconds until a fault is named, and until nothing is said of it any more."""
LASTING = ("store-flip", "store-short")
"""Faults that stay in files, which may be read much later."""
BETWEEN_S = 0.4
"""Mean seconds before each request of a lane: the engine then takes well under one processor."""
_STORE = r"the store of stage {0} |backend disk is slow: .* the store of stage {0}$|backend disk (?:is broken|fails)\b"
_WRITES = r"backend disk (?:is broken|fails)\b"
FAULTS = {
    "store-kill": (False, "the store of stage {0} "), "store-stop": (True, _STORE), "store-slow": (True, _STORE),
    "store-flip": (True, "backend disk gave "), "store-short": (True, "backend disk gave "),
    "store-full": (True, _WRITES),
}  # fmt: skip
"""Faults of the registry: whether an alarm is owed, and the summaries that name one at stage {0}."""


@dataclass(frozen=True)
class Plan:
    """One thing to do. `may` matches the right alarms, as `cause@stage: summary`; `owed`: one must come."""

    action: Callable[[], Awaitable[None]]
    may: str = "(?!)"
    owed: bool = False


class Soak:
    """One engine with its load, and what has been done."""

    def __init__(self, engine: Served, watcher: Watcher, load: Load, source: random.Random, disk: Path) -> None:
        self.engine, self.watcher, self.load, self.source, self.disk = engine, watcher, load, source, disk
        self.alarms, self.sizes, self.done = Alarms(watcher), Sizes(engine), Counter[str]()
        self.problems: list[str] = []
        self._killed = -KILLS_S

    @property
    def age(self) -> float:
        return self.alarms.age

    async def act(self, name: str, plan: Plan) -> None:
        """Do one thing, then wait until all is well, and a spell longer."""
        print(f"{self.age:6.0f} s  {name}, {self.load.ended} requests ended", flush=True)
        self.done[name] += 1
        self.alarms.begin(plan.may)
        read = await self._read_bytes()
        try:
            await plan.action()
        except AssertionError as error:
            self.problems.append(f"{self.age:.0f} s {name}: {error}"[:1500])
        until = time.monotonic() + NAMED_S
        while plan.owed and time.monotonic() < until and not self.alarms.judge():
            await asyncio.sleep(0.1)
        # What nothing has read cannot be found.
        owed = plan.owed and (name not in LASTING or await self._read_bytes() > read)
        await self.watcher.link.command(ClearFaults(), timeout=30)
        await self._mend(name)
        try:
            await self.watcher.until(_well, "all is well", HEALED_S)
        except AssertionError as error:
            self.problems.append(f"{self.age:.0f} s {name}: {error}"[:1500])
        self.alarms.end(name, owed=owed)
        await asyncio.sleep(self.source.uniform(*SPELL_S))
        self.alarms.judge()
        self.sizes.measure(self.age)

    async def _read_bytes(self) -> int:
        """Return the bytes that were read from the files since the core's start."""
        tiers = (await self.watcher.now()).tiers
        assert tiers is not None
        return sum(one.read_bytes_total for one in tiers.backends if one.name == "disk")

    async def _mend(self, name: str) -> None:
        """Put back what stays after a fault has been cleared."""
        aside = self.disk.with_suffix(".aside")
        if aside.exists():
            self.disk.unlink()
            aside.rename(self.disk)
        if name in LASTING:
            await self.watcher.do(StoreClear(backend="disk"))
        if name == "quota full":
            await self.watcher.do(StoreRemove(backend="small"))

    async def do(self, *verbs: Verb) -> None:
        """Apply verbs, one after another, with a moment between."""
        for verb in verbs:
            await self.watcher.do(verb)
            await asyncio.sleep(self.source.uniform(0.5, 2.0))

    async def fault(self, kind: str, stage: int) -> None:
        """Plant a fault in a store, once there are chunks."""
        await self.watcher.until(lambda _: any(self.disk.glob(f"{stage}.0/*/*/*")), "the store has written chunks")
        await self.watcher.do(Fault(kind=kind, stage=stage))

    async def kill(self, role: str) -> None:
        """Kill a stage or the core."""
        self._killed = time.monotonic()
        self.engine.find_pids()
        os.kill(self.engine.pids[role], signal.SIGKILL)

    async def lose(self, *, blocked: bool) -> None:
        """Take the folder away from the stores; `blocked`: a file has its place until all is mended."""
        aside = self.disk.with_suffix(".aside")
        self.disk.rename(aside)
        if blocked:
            self.disk.touch()
        else:
            await asyncio.to_thread(shutil.rmtree, aside)

    async def churn(self) -> None:
        """Take blocks from requests, and change the memory."""
        for share in (0.6, 0.85, 0.7, 0.9):
            # Less than what requests hold is refused at times.
            await self.watcher.link.command(SetMemory(utilization=share), timeout=60)
            for name in self.load.names[-2:]:
                for verb in (SwapOut(request=name, hold=False), Preempt(request=name, mode="recompute")):
                    await self.watcher.link.command(verb, timeout=30)  # It may have ended: a refusal is an answer.
            await asyncio.sleep(0.5)

    async def abort(self) -> None:
        """Abort the newest requests, which is then no error of theirs."""
        names = self.load.names[-2:]
        for name in names:
            await self.watcher.link.command(Abort(request=name), timeout=30)
        await self.watcher.until(lambda _: not set(names) & set(self.load.names), "aborted requests end")
        ended = {f"{name} ended by abort" for name in names}
        self.load.errors = [text for text in self.load.errors if text not in ended]

    def plans(self) -> dict[str, Plan]:
        """Return everything that may happen now."""
        stage = self.source.randrange(STAGES)
        mem = StoreAdd(backend="mem", kind="memory", quota_gib=0.05, write="always")
        small = StoreAdd(backend="small", kind="files", url=f"{self.disk}-small", quota_gib=0.01, write="always")
        verbs: dict[str, list[Verb]] = {
            "pause, resume": [StorePause(backend="disk"), StoreResume(backend="disk")],
            "drain, resume": [StoreDrain(backend="disk"), StoreResume(backend="disk")],
            "add, remove": [mem, StoreTest(backend="mem"), StorePause(backend="disk"), StoreResume(backend="disk"),
                            StoreRemove(backend="mem")],
            "clear": [StoreClear(backend="disk")],
            "test": [StoreTest(backend="disk")],
        }  # fmt: skip
        found = {
            **{kind: Plan(partial(self.fault, kind, stage), f"store@None: (?:{may.format(stage)})", owed)
               for kind, (owed, may) in FAULTS.items()},
            **{name: Plan(partial(self.do, *each)) for name, each in verbs.items()},
            "quota full": Plan(partial(self.do, small, *[StoreTest(backend="small")] * 4),
                               "store@None: backend small is full"),
            "folder removed": Plan(partial(self.lose, blocked=False), f"store@None: {_WRITES}"),
            "folder blocked": Plan(partial(self.lose, blocked=True), f"store@None: {_WRITES}", owed=True),
            "memory and preemption": Plan(self.churn),
            "abort": Plan(self.abort),
        }  # fmt: skip
        if time.monotonic() - self._killed >= KILLS_S:
            found["stage killed"] = Plan(partial(self.kill, f"stage{stage}"), f"dead@{stage}: ", owed=True)
            found["core killed"] = Plan(partial(self.kill, "core"), "core@None: ", owed=True)
        return found


def _well(picture: Snapshot) -> bool:
    """Return whether the engine serves, with its stores, and nothing is said of it."""
    tiers_there = picture.tiers is not None and picture.tiers.ready and not picture.tiers.slots_quarantined
    opened = picture.tiers is not None and all(one.state == "open" for one in picture.tiers.backends)
    return picture.engine.state == "serving" and not picture.verdicts and tiers_there and opened


def _left(picture: Snapshot) -> list[str]:
    """Return what of KV tiers is not idle."""
    assert picture.tiers is not None
    tiers, names = picture.tiers, ("slots_swapped", "slots_moving", "slots_quarantined", "finding", "fetching")
    lines = [f"{name}: {getattr(tiers, name)}" for name in names if getattr(tiers, name)]
    lines += [f"store of stage {one.stage}: {one.jobs} jobs" for one in tiers.stores if one.jobs]
    lines += [f"backend {one.name}: {one.queue} calls wait" for one in tiers.backends if one.queue]
    return lines


async def soak(minutes: float, seed: int, only: list[str]) -> int:
    """Run; print what was done and what came of it. Returns the exit code."""
    folder, source = tempfile.mkdtemp(prefix="pp-tiers-"), random.Random(seed)
    disk = Path(folder, "chunks")
    settings = [*tiers(str(disk)), "memory.utilization=0.9"]
    engine = await asyncio.to_thread(Served, profile(STAGES, *settings), "--allow-faults", step_s=LASTING_S)
    try:
        async with watch(engine.record) as watcher:
            load = Load(watcher, seed=seed, long=True, between_s=BETWEEN_S)
            run = Soak(engine, watcher, load, source, disk)
            load.start()
            await asyncio.sleep(20)
            while run.age < minutes * 60 and not load.errors and not load.wrong:
                plans = run.plans()
                name = source.choice([one for one in plans if not only or one in only] or ["test"])
                await run.act(name, plans[name])
            ended = await load.finish(120)
            run.alarms.judge()
            problems = [*run.problems, *load.errors, *(f"wrong tokens: {name}" for name in load.wrong)]
            problems += [*run.sizes.grown(), *run.alarms.silent]
            problems += [] if ended else [f"{len(load.names)} requests have not ended"]
            try:
                await watcher.until(lambda now: not _left(now), "nothing is left to do")
                await watcher.idle()
            except AssertionError as error:
                problems.append(f"not idle: {error}"[:1500])
            last = await watcher.now()
            problems += _left(last)
    finally:
        await asyncio.to_thread(end, engine)
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{run.age / 60:.1f} minutes, {load.ended} requests ended, {load.judged} judged;"
          f" the engine took {run.sizes.cpu_share(run.age):.2f} processors")  # fmt: skip
    print(*(f"| {name} | {count} | {run.alarms.row(name)} |" for name, count in sorted(run.done.items())), sep="\n")
    assert last.tiers is not None
    files = last.tiers.backends[0]
    print(f"tokens from files {files.hit_tokens_total}, of {last.tiers.prompt_tokens_total} since the last core;"
          f" corrupt shards {files.corrupt_total}, failed fetches {last.tiers.failed_fetches_total}")  # fmt: skip
    for title, lines in (("false alarms", run.alarms.false), ("problems", problems)):
        print(f"{title}: {len(lines)}", *lines, sep="\n  ")
    return 1 if run.alarms.false or problems else 0


def main() -> int:
    """Run the soak."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of actions, with semicolons between")
    options = parser.parse_args()
    learn(long=True)
    return asyncio.run(soak(options.minutes, options.seed, [one for one in options.only.split(";") if one]))


if __name__ == "__main__":
    sys.exit(main())
