"""A console that `test_nodes` runs on the engine's own host: chunks of KV blocks, with stores on three nodes.

`python stores_client.py ENGINE FILE STEPS`: computes the prompts of FILE (JSON), loads the chunks of the first half and
then those of the second. One JSON line of answers at a time. Before each of both loads
it waits for a line on its input, and for a core that has no slots: the test kills the one before it. That core measures
the backend by the first prompt of FILE, which is in no half.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from nodes_client import LIMIT_S, Watcher, answer, places
from ppconsole.link.engine_link import EngineLink
from ppengine.protocol import discovery
from ppengine.protocol.tiers import TiersInfo


async def main(engine: str, prompts: list[list[int]], steps: int) -> None:
    """Run the scenario."""
    record = next(one for one in discovery.list_engines() if one.id == engine)
    link = EngineLink(record, find=lambda: record, user="stores", backlog=0)
    op = Watcher(link)
    await link.start(op.take)
    first, *prompts = prompts
    half = len(prompts) // 2

    async def measure() -> None:
        """Compute a prompt whose chunk is there: files are read beside it."""
        before = (await _tiers(op, _is_ready, "stores and files are there")).backends[0].read_bytes_total
        await op.all_tokens(await op.submit_all([first], max_tokens=1))
        await _tiers(
            op,
            # The last place to read says how long it takes.
            lambda now: now.backends[0].read_bytes_total > before and not any(store.jobs for store in now.stores),
            "all places have read files",
        )

    try:
        await link.attached(60)
        await _tiers(op, _is_ready, "stores and files are there")
        await op.all_tokens(await op.submit_all([first], max_tokens=1))
        names = await op.submit_all(prompts, max_tokens=steps)
        tokens = await op.all_tokens(names)
        answer(tokens=tokens, places=places(await op.now()))
        await _go()
        await _tiers(op, lambda now: _is_ready(now) and not now.slots_cached, "the next core has all stores")
        await measure()
        names = await op.submit_all(prompts[:half], max_tokens=steps)
        tokens, sources = await op.all_tokens(names), [(await op.detail(name)).sources for name in names]
        answer(tokens=tokens, loaded=[one.backends if one is not None else {} for one in sources])
        await _go()
        await _tiers(op, lambda now: _is_ready(now) and not now.slots_cached, "the third core has all stores")
        await measure()
        answer(ready=True)
        await _go()
        names = await op.submit_all(prompts[half:], max_tokens=steps)
        await _tiers(op, lambda now: now.finding + now.fetching, "requests wait for a store")
        answer(waits=True)
        tokens = await op.all_tokens(names)
        await _tiers(op, lambda now: _is_ready(now) and not now.slots_quarantined, "the store is back")
        answer(tokens=tokens, events=[[one.kind, one.stage, one.text] for one in await op.heard()])
    finally:
        await link.close()


async def _tiers(op: Watcher, condition: Callable[[TiersInfo], object], what: str) -> TiersInfo:
    """Wait until the tiers are as wanted."""
    picture = await op.until(lambda now: now.tiers is not None and condition(now.tiers), what, LIMIT_S)
    assert picture.tiers is not None
    return picture.tiers


def _is_ready(now: TiersInfo) -> bool:
    return now.ready and now.backends[0].state == "open"


async def _go() -> None:
    """Wait for the test."""
    assert await asyncio.to_thread(sys.stdin.readline), "the test has ended"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3])))
