"""Negative controls: what looks like a fault and is none. Any root verdict here is a false alarm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import reference
from drill import end
from load import VOCABULARY, Load, profile
from ppengine.protocol.verbs import ClearFaults, Fault, Pause, Preempt, Resume, SetMemory, SwapIn, SwapOut
from serving import Served
from slowload import slow_load
from watching import Watcher, tell, watch

STAGES = 2
_IDLE_S = 120.0


class World:
    """One engine under a load that can be paused."""

    def __init__(self, engine: Served, watcher: Watcher) -> None:
        self.engine, self.watcher, self.load = engine, watcher, Load(watcher)

    async def busy(self, seconds: float) -> None:
        """Let the load run for a while."""
        self.load.start()
        await asyncio.sleep(seconds)


@contextlib.asynccontextmanager
async def world(stages: int = STAGES, *settings: str) -> AsyncIterator[World]:
    """Serve and attach; ends both."""
    engine = await asyncio.to_thread(Served, profile(stages, *settings), "--allow-faults")
    try:
        async with watch(engine.record) as watcher:
            one = World(engine, watcher)
            try:
                yield one
            finally:
                await one.load.drop()
    finally:
        await asyncio.to_thread(end, engine)


async def pause(world: World) -> None:
    """Three pauses of 5 s, in every mode, with requests in flight."""
    for mode in ("keep", "wait", "abort"):
        await world.busy(2.0)
        await world.watcher.do(Pause(mode=mode))  # type: ignore[arg-type]
        await asyncio.sleep(5.0)
        await world.watcher.do(Resume())
        world.load.errors.clear()  # what a pause aborts has not failed
    await world.busy(2.0)


async def resize(world: World) -> None:
    """Memory utilization between 0.5 and 0.9 ten times under load."""
    for share in (0.5, 0.9) * 5:
        await world.busy(0.7)
        await world.watcher.do(SetMemory(utilization=share))


async def swap_storm(world: World) -> None:
    """Every running request is swapped out and in, over and over, for 20 s."""
    world.load.start()
    until = time.monotonic() + 20
    while time.monotonic() < until:
        for name in list(world.load.names):
            for verb in (SwapOut(request=name), SwapIn(request=name), Preempt(request=name, mode="recompute")):
                # It may have ended, or be on its way: a refusal is an answer.
                await world.watcher.link.command(verb, timeout=30)
        await asyncio.sleep(0.05)


async def console_crash(world: World) -> None:
    """Consoles are killed in the middle of following a request, and attach again, five times."""
    await world.busy(1.0)
    for _ in range(5):
        name = world.load.names[0]
        process = world.engine.start_cli("follow", name)
        await asyncio.sleep(1.5)
        process.kill()
        await asyncio.to_thread(process.communicate)
        async with watch(world.engine.record, "again") as other:
            await asyncio.sleep(1.0)
            world.watcher.changes += other.changes


async def idle(world: World) -> None:
    """Two minutes of nothing, then work."""
    await world.busy(2.0)
    await world.load.finish(30)
    await asyncio.sleep(_IDLE_S)
    await world.busy(3.0)


async def long_prefill(world: World) -> None:
    """Prompts of 900 tokens in chunks of 64, sixteen at once."""
    prompts = reference.prompts(16, VOCABULARY, low=900, high=900, seed=9)
    names = await world.watcher.submit_all(prompts, max_tokens=8)
    for name in names:
        await world.watcher.output(name, timeout=120)


async def slow_console(world: World) -> None:
    """A console is stopped by SIGSTOP, and another one reads nothing, for 15 s."""
    await world.busy(1.0)
    process = world.engine.start_cli("watch", stdin=subprocess.DEVNULL)
    await asyncio.sleep(1.0)
    os.kill(process.pid, signal.SIGSTOP)
    await world.watcher.do(Fault(kind="slow-subscriber"))
    await asyncio.sleep(15.0)
    os.kill(process.pid, signal.SIGCONT)
    process.kill()
    await asyncio.to_thread(process.communicate)
    await world.watcher.do(ClearFaults())


async def stacks(world: World) -> None:
    """Stacks of all stages with native frames, which hold them, over and over for 20 s."""
    await world.busy(2.0)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        process = world.engine.start_cli("stacks")
        await asyncio.to_thread(process.communicate)
        assert process.returncode == 0, f"stacks ended with {process.returncode}"


async def busy_machine(world: World) -> None:
    """As many spinning processes as processors beside the engine, for 15 s."""
    spin = [subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"]) for _ in range(os.cpu_count() or 1)]
    try:
        await world.busy(15.0)
    finally:
        for process in spin:
            process.kill()
            process.wait()


Control = Callable[[World], Awaitable[None]]
CONTROLS: dict[str, Control] = {
    function.__name__.replace("_", "-"): function
    for function in (pause, resize, swap_storm, console_crash, idle, long_prefill, slow_console, stacks, busy_machine)
}
_LOADING = "slow-load"
NAMES = (_LOADING, *CONTROLS)
_SETTINGS = {"long-prefill": ("scheduler.max_num_batched_tokens=64",)}


async def control(name: str) -> dict[str, Any]:
    """Run one control; return its name, what it does, alarms, and what went wrong with it."""
    begun, problem, alarms = time.monotonic(), "", []
    does = (slow_load.__doc__ if name == _LOADING else CONTROLS[name].__doc__) or ""
    try:
        if name == _LOADING:
            alarms = await slow_load()
        else:
            async with world(STAGES, *_SETTINGS.get(name, ())) as one:
                await CONTROLS[name](one)
                alarms = tell(one.watcher)
                problem = "; ".join([*one.load.errors[:1], *(f"wrong tokens: {wrong}" for wrong in one.load.wrong[:1])])
    except (AssertionError, TimeoutError, OSError) as error:
        problem = f"{type(error).__name__}: {error}"[:200]
    seconds = time.monotonic() - begun
    return {"name": name, "does": does, "alarms": alarms, "problem": problem, "seconds": seconds}
