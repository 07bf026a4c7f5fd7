"""The load of `demo --load`: enough requests to wait, swap and preempt, never more than a bounded queue."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppengine.protocol.discovery import EngineRecord
    from ppengine.protocol.recording import Update
    from ppengine.protocol.snapshot import Snapshot
    from ppengine.protocol.verbs import Submit

    from ppconsole.link.engine_link import EngineLink

QUEUE = 6
"""Requests that should be waiting at any time."""
OPENINGS = (
    "Once upon a time there was",
    "The little girl looked at the",
    "Every morning the farmer",
    "In a small house by the sea",
    "The dog ran after the",
    "No one knew why the old tree",
    "When the rain stopped,",
    "The king had three",
    "On the way to school Tom",
    "A long road led to",
)


class Load(threading.Thread):
    """Submits in a thread with a loop and a link of its own, so that the console's loop is not held up."""

    def __init__(self, record: EngineRecord, seed: int = 0) -> None:
        super().__init__(name="demo-load", daemon=True)
        self._record = record
        self._random = random.Random(seed)
        self._halt = threading.Event()
        self.submitted = 0

    def run(self) -> None:
        """Submit until stopped."""
        asyncio.run(self._run())

    def stop(self) -> None:
        """Stop submitting; submitted requests stay in the engine."""
        self._halt.set()
        self.join(5)

    async def _run(self) -> None:
        from ppengine.protocol.snapshot import Snapshot

        from ppconsole.link.engine_link import EngineLink
        from ppconsole.link.source import LinkLost

        newest: Snapshot | None = None

        def take(update: Update) -> None:
            nonlocal newest
            if isinstance(update, Snapshot):
                newest = update

        link = EngineLink(self._record, user="load", backlog=0)
        await link.start(take)
        try:
            while not self._halt.is_set():
                picture, newest = newest, None
                if picture is not None:
                    with contextlib.suppress(LinkLost):  # the link comes back by itself, and this load has no hurry
                        await self._top_up(link, picture)
                await asyncio.sleep(0.2)
        finally:
            await link.close()

    async def _top_up(self, link: EngineLink, picture: Snapshot) -> None:
        """Submit what keeps `QUEUE` requests waiting; nothing to an engine that takes none."""
        if picture.engine.state not in ("serving", "resizing", "degraded"):
            return
        for _ in range(min(QUEUE - picture.queues.waiting, QUEUE)):
            await link.command(self._request(picture.engine.max_model_len), timeout=5.0)
            self.submitted += 1

    def _request(self, max_model_len: int) -> Submit:
        """Return a random request: short or long prompt, short or long output, greedy or not."""
        from ppengine.protocol.sampling import SamplingParams
        from ppengine.protocol.verbs import Submit

        draw = self._random
        prompt = " ".join(draw.choices(OPENINGS, k=draw.choice((1, 1, 2, 4))))
        longest = max(16, max_model_len // 2) if max_model_len else 128
        sampling = SamplingParams(
            temperature=draw.choice((0.0, 0.7, 1.0)),
            max_tokens=draw.randint(min(32, longest), longest),
            ignore_eos=draw.random() < 0.7,
            seed=draw.randrange(2**31),
        )
        return Submit(prompt=prompt, sampling=sampling)
