"""Several asynchronous iterators as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(sources: Sequence[AsyncIterator[T]]) -> AsyncGenerator[T, None]:
    """Yield the values of all `sources` as they come; an error of one ends all."""
    if len(sources) == 1:
        async for value in sources[0]:
            yield value
        return
    queue: asyncio.Queue[T | None] = asyncio.Queue()

    async def drain(source: AsyncIterator[T]) -> None:
        try:
            async for value in source:
                queue.put_nowait(value)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(drain(source)) for source in sources]
    try:
        left = len(tasks)
        while left:
            found = await queue.get()
            if found is not None:
                yield found
                continue
            left -= 1
            for task in tasks:
                if task.done():
                    task.result()
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()
