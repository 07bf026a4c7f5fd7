"""The soak: one engine, a mixed load, and everything that operators do to it; not one alarm, not one wrong token."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import controls
from controls import World
from load import Load
from slowload import slow_load
from watching import tell

_SPELL_S = (5.0, 30.0)
_SLOW_LOAD_EVERY_S = 900.0
_ABORTED = "ended by abort"


async def soak(minutes: float, seed: int, tensor: int = 1) -> int:
    """Run for `minutes` with `tensor` ranks a stage; print all actions and their results. Returns the exit code."""
    source, done, alarms = random.Random(seed), Counter(), []
    begun = time.monotonic()
    until = begun + minutes * 60
    next_load, told = begun, 0
    async with controls.world(2, "memory.utilization=0.55", f"parallel.tensor={tensor}") as world:
        world.load = Load(world.watcher, seed=seed)
        while time.monotonic() < until and not world.load.errors:
            if time.monotonic() >= next_load:
                next_load = time.monotonic() + _SLOW_LOAD_EVERY_S
                world.load.start()
                _add(alarms, [f"slow load: {text}" for text in await slow_load()])
                done["slow-load"] += 1
                continue
            name = source.choice(_ACTIONS)
            print(f"{time.monotonic() - begun:6.0f} s  {name}, {world.load.ended} requests ended", flush=True)
            await _act(name, world, source, until)
            _add(alarms, tell(world.watcher)[told:])
            told = len(world.watcher.alarms)
            done[name] += 1
        ended = await world.load.finish(120)
        _add(alarms, tell(world.watcher)[told:])
        problems = [*world.load.errors, *(f"wrong tokens: {name}" for name in world.load.wrong)]
        problems += [] if ended else [f"{len(world.load.names)} requests have not ended"]
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes: {dict(sorted(done.items()))}")
    print(f"{world.load.ended} requests ended, {world.load.judged} greedy ones judged against the reference")
    for title, lines in (("false alarms", alarms), ("problems", problems)):
        print(f"{title}: {len(lines)}")
        for text in lines:
            print(f"  {text}")
    return 1 if alarms or problems else 0


def _add(alarms: list[str], new: list[str]) -> None:
    """Add and print what is new: who waits for the end of an hour learns of a false alarm when it comes."""
    alarms += new
    for text in new:
        print(f"ALARM: {text}", flush=True)


_ACTIONS = ["busy", "busy", "idle", "pause", "resize", "swap-storm", "console-crash", "long-prefill", "slow-console"]


async def _act(name: str, world: World, source: random.Random, until: float) -> None:
    left = max(1.0, until - time.monotonic())
    spell = min(left, source.uniform(*_SPELL_S))
    if name == "busy":
        await world.busy(spell)
    elif name == "idle":
        await world.load.finish(60)
        await asyncio.sleep(spell)
    else:
        world.load.start()
        await asyncio.sleep(1.0)
        await controls.CONTROLS[name](world)
    # What a pause aborts has not failed.
    world.load.errors = [text for text in world.load.errors if _ABORTED not in text]
