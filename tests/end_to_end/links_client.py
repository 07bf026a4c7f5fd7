"""A console that `test_nodes` runs on the engine's own host: requests without an end, and verdicts on links.

`python links_client.py ENGINE FILE STEPS`: keeps requests of STEPS tokens with the prompts of FILE (JSON) running.
One JSON line of answers at a time: where the stages are once the links are known, a root verdict on a link, and that
no verdict is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path

from nodes_client import WRITTEN, Watcher, answer, places
from ppconsole.link.engine_link import EngineLink
from ppengine.protocol import discovery
from ppengine.protocol.snapshot import Snapshot, Verdict

KNOWN_S = 4.0
"""Seconds of load after which the usual times of links are known."""
LIMIT_S = 30.0


async def main(engine: str, prompts: list[list[int]], steps: int) -> None:
    """Run the scenario."""
    record = next(one for one in discovery.list_engines() if one.id == engine)
    link = EngineLink(record, find=lambda: record, user="links", backlog=0)
    op = Watcher(link)
    await link.start(op.take)
    names = dict.fromkeys(range(len(prompts)), "")

    async def load(index: int) -> None:
        while True:
            names[index] = await op.submit(prompts[index], max_tokens=steps)
            await op.output(names[index])

    try:
        await link.attached(60)
        async with asyncio.TaskGroup() as group:
            loads = [group.create_task(load(index)) for index in names]
            await op.until(lambda picture: all(names.values()), "all requests run")
            for name in names.values():
                await op.written(name, WRITTEN)
            await asyncio.sleep(KNOWN_S)
            answer(places=places(await op.now()), roots=op.roots, wall=time.time())
            picture = await op.until(_slow_links, "a verdict on a link", LIMIT_S)
            (found,) = _slow_links(picture)
            answer(stage=found.stage, summary=found.summary, evidence=found.evidence, roots=op.roots, wall=time.time())
            await op.until(lambda picture: not picture.verdicts, "no verdict is left", LIMIT_S)
            answer(roots=op.roots, wall=time.time())
            for task in loads:
                task.cancel()
        await op.abort(*names.values())
        await op.idle()
    finally:
        await link.close()


def _slow_links(picture: Snapshot) -> list[Verdict]:
    return [verdict for verdict in picture.verdicts if verdict.root and verdict.cause == "link"]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3])))
