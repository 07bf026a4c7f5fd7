"""Drills side by side. A lane is a process with processors of its own; its engines inherit them."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.queues import SimpleQueue

from drill import PATIENCE_S, Result, drill, end
from load import Load, profile
from ppengine.drills.registry import Kind, find
from serving import Served
from watching import watch

Drill = tuple[Kind, int, str, int, int]
"""Kind, number of stages, position, ranks of a stage, the rank that is struck."""
WARM, WARM_S = 4, 300.0


def split(usable: Iterable[int], cores: int, most: int) -> list[set[int]]:
    """Return the processors of up to `most` lanes of `cores` each; one lane has all of them if there are too few."""
    numbers = sorted(usable)
    lanes = [set(numbers[at : at + cores]) for at in range(0, len(numbers) - cores + 1, cores)]
    return lanes[:most] or [set(numbers)]


def run(todo: Iterable[Drill], lanes: list[set[int]], within_s: float) -> Iterator[tuple[Result, float]]:
    """Yield results with their seconds, as they come; those that need patience begin first.

    None begins after `within_s`. The first engine runs alone: it compiles the kernels that all others load.
    """
    until = time.monotonic() + within_s
    # Forked, so that the lanes know the reference's tokens.
    context = multiprocessing.get_context("fork")
    processors: SimpleQueue[set[int]] = context.SimpleQueue()
    for lane in lanes:
        processors.put(lane)
    ordered = sorted(todo, key=lambda one: -PATIENCE_S[one[0].effect])
    with ProcessPoolExecutor(len(lanes), context, initializer=_bind, initargs=(processors,)) as pool:
        pool.submit(_compile).result()
        # By name: a kind has functions, which do not travel.
        ends = [pool.submit(_run, kind.name, *rest, until=until) for kind, *rest in ordered]
        for one in as_completed(ends):
            if (found := one.result()) is not None:
                yield found


def _bind(processors: SimpleQueue[set[int]]) -> None:
    os.sched_setaffinity(0, processors.get())


def _run(kind: str, stages: int, position: str, tensor: int, rank: int, *, until: float) -> tuple[Result, float] | None:
    begun = time.monotonic()
    if begun > until:
        return None
    return asyncio.run(drill(find(kind), stages, position, tensor, rank)), time.monotonic() - begun


def _compile() -> None:
    asyncio.run(_work())


async def _work() -> None:
    """Have an engine end a few requests."""
    engine = await asyncio.to_thread(Served, profile(2))
    try:
        async with watch(engine.record) as watcher:
            load = Load(watcher)
            load.start()
            await watcher.until(lambda picture: load.ended >= WARM, "requests have ended", WARM_S)
            await load.finish(WARM_S)
    finally:
        await asyncio.to_thread(end, engine)
