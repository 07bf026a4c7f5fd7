"""Pilots go on once tasks, threads and timers that are soon due have done their work, and wait for no later timer."""

from __future__ import annotations

import asyncio
import threading

from settled import SOON_S, settled


async def test_tasks_that_wake_each_other_end_first():
    steps = []

    async def chain(left: int) -> None:
        steps.append(left)
        if left:
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(asyncio.ensure_future, chain(left - 1))

    task = asyncio.ensure_future(chain(50))
    await settled(max_sleep=60.0)
    assert steps == list(range(50, -1, -1)) and task.done()


async def test_a_timer_that_is_soon_due_runs_first_and_a_later_one_does_not():
    fired, loop = [], asyncio.get_running_loop()
    loop.call_later(SOON_S / 2, fired.append, "soon")
    later = loop.call_later(3600, fired.append, "later")
    await settled(max_sleep=60.0)
    assert fired == ["soon"]
    later.cancel()


async def test_a_thread_hands_over_its_result_first():
    """One that is blocked is given up."""
    answer = asyncio.ensure_future(asyncio.to_thread(sum, range(1000)))
    await settled(max_sleep=60.0)
    assert answer.result() == 499500
    blocked = threading.Event()
    waits = asyncio.ensure_future(asyncio.to_thread(blocked.wait))
    await settled(max_sleep=0.01)
    assert not waits.done()
    blocked.set()
    assert await waits


async def test_a_task_that_never_rests_is_not_waited_for():
    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    task = asyncio.ensure_future(spin())
    await settled(max_sleep=0.01)
    assert not task.done()
    task.cancel()
