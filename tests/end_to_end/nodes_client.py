"""A console that `test_nodes` runs on the engine's own host: requests over stages on three nodes.

`python nodes_client.py ENGINE FILE STEPS`: submits the prompts of FILE (JSON). One JSON line of answers at a time:
where the stages are and their rings once all requests write, and at the end tokens, verdicts and places.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from operators import Operator
from ppconsole.link.engine_link import EngineLink
from ppengine.protocol import discovery
from ppengine.protocol.inspection import RingsDetail, StacksDetail
from ppengine.protocol.recording import Update
from ppengine.protocol.snapshot import Event, Snapshot

WRITTEN, LIMIT_S = 10, 150.0


class Watcher(Operator):
    """Notes when a root verdict was seen first."""

    def __init__(self, link: EngineLink) -> None:
        super().__init__(link)
        self.roots: dict[str, dict[str, Any]] = {}

    def take(self, update: Update) -> None:
        """Take one update of the link."""
        super().take(update)
        if isinstance(update, Snapshot):
            for verdict in update.verdicts:
                if verdict.root and verdict.summary not in self.roots:
                    seen = {"wall": time.time(), "stage": verdict.stage, "cause": verdict.cause}
                    self.roots[verdict.summary] = {**seen, "evidence": verdict.evidence}


async def main(engine: str, prompts: list[list[int]], steps: int) -> None:
    """Run the scenario."""
    record = next(one for one in discovery.list_engines() if one.id == engine)
    link = EngineLink(record, find=lambda: record, user="nodes", backlog=0)
    op = Watcher(link)
    await link.start(op.take)
    try:
        await link.attached(60)
        picture = await op.until(lambda picture: picture.engine.state == "serving", "it serves")
        names = await op.submit_all(prompts, max_tokens=steps)
        for name in names:
            await op.written(name, WRITTEN)
        answer(places=places(picture), rings=await rings(link), stacks=await stacks(link), mono_ns=time.monotonic_ns())
        outputs = [await op.output(name, timeout=LIMIT_S) for name in names]
        picture = await op.until(
            lambda picture: picture.engine.state == "serving" and not picture.verdicts, "it serves again", LIMIT_S
        )
        answer(
            tokens=[tokens for tokens, _, _ in outputs],
            reasons=[reason for _, _, reason in outputs],
            roots=op.roots,
            places=places(picture),
            events=[[event.kind, event.text, event.wall] for event in op.events if isinstance(event, Event)],
        )
    finally:
        await link.close()


def answer(**found: Any) -> None:
    """Print one line for the test."""
    print(json.dumps(found), flush=True)


def places(picture: Snapshot) -> list[tuple[str, int | None]]:
    """Return host and pid of each stage."""
    return [(stage.host, stage.pid) for stage in picture.stages]


async def rings(link: EngineLink) -> list[dict[str, Any]]:
    """Return what the timeline gets of each stage: its newest operation, and how sure its time is."""
    detail = await link.inspect("rings", lines=8)
    assert isinstance(detail, RingsDetail)
    return [
        {
            "stage": each.stage,
            "node": each.node,
            "error": each.error,
            "clock_error_ms": each.clock_error_ms,
            "newest_ns": max((one.begun_ns for thread in each.threads for one in thread.records), default=0),
        }
        for each in detail.stages
    ]


async def stacks(link: EngineLink) -> list[tuple[int | None, int]]:
    """Return how many threads the stacks of each stage have."""
    detail = await link.inspect("stacks")
    assert isinstance(detail, StacksDetail)
    return [(each.stage, len(each.threads)) for each in detail.stages]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3])))
