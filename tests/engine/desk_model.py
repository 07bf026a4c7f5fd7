"""A model of the store desk: it sets requests aside, fetches blocks into host slots and answers late.

A fetch writes what a backend would have: the right content of the request's next blocks. One that
comes too late writes something else, which shows if its slots were used meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppengine.core.scheduler import Request
from stage_model import chain


@dataclass
class Job:
    """One fetch under way."""

    request: Request
    slots: list[int]
    digests: list[bytes]
    first: int
    """Block of the prompt that the first slot gets."""
    lost: bool = False
    """Whether a new generation began meanwhile."""
    quarantined: bool = False


class DeskModel:
    """Uses the host cache and the queues as the store desk does."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.jobs: list[Job] = []
        self.fetched = 0
        """Blocks that fetches have entered."""
        self.late = 0
        """Fetches whose request had gone."""

    @property
    def _copies(self):
        return self.world.scheduler.blocks.copies

    @property
    def reserved(self) -> list[int]:
        """Slots of all fetches under way."""
        return [slot for job in self.jobs for slot in job.slots]

    def find(self, index: int) -> bool:
        """Set a waiting request aside."""
        waiting = self.world.scheduler.queues.waiting
        if not waiting:
            return False
        self.world.scheduler.queues.set_aside(waiting[index % len(waiting)], "finding")
        return True

    def fetch(self, index: int) -> bool:
        """Begin the fetch of a request that is aside; put it back if there is nothing to fetch."""
        queues, size = self.world.scheduler.queues, self.world.scheduler.blocks.block_size
        finding = [request for request in queues.aside if request.state == "finding"]
        if not finding:
            return False
        request = finding[index % len(finding)]
        digests = request.full_digests((request.num_tokens - 1) // size, size)
        first = len(self._copies.cache.lookup(digests))
        behind = digests[first:]
        slots = self._copies.cache.reserve(len(behind))
        if not slots:
            queues.take_back(request)
            return True
        queues.set_aside(request, "fetching", f"fetching {len(slots)} blocks")
        self.jobs.append(Job(request, slots, behind, first))
        return True

    def give_up(self, index: int) -> bool:
        """Put a request back whose deadline has passed; its slots go into quarantine."""
        queues = self.world.scheduler.queues
        if not queues.aside:
            return False
        request = list(queues.aside)[index % len(queues.aside)]
        queues.take_back(request)
        for job in self.jobs:
            if job.request is request and not job.quarantined:
                job.quarantined = True
                self._copies.cache.quarantine(job.slots)
        return True

    def answer(self, index: int) -> bool:
        """End a fetch: its blocks are entered if its request still waits for them, else its slots are released."""
        if not self.jobs:
            return False
        job = self.jobs.pop(index % len(self.jobs))
        queues, cache = self.world.scheduler.queues, self._copies.cache
        if job.lost or job.quarantined or job.request not in queues.aside:
            for stage in self.world.model.stages:
                stage.host.update((slot, [0] * stage.block_size) for slot in job.slots)
            cache.release(job.slots)
            self.late += 1
            return True
        self._write(job)
        for slot, digest in zip(job.slots, job.digests, strict=True):
            self.fetched += cache.enter(slot, digest)
        slots = cache.lookup(job.digests)
        self._copies.keep_for(job.request, slots, "nvme0")
        queues.take_back(job.request)
        return True

    def lose(self) -> None:
        """Note that a new generation began."""
        for job in self.jobs:
            job.lost = True

    def settle(self) -> None:
        """End all fetches and put every request back."""
        while self.jobs:
            self.answer(0)
        for request in list(self.world.scheduler.queues.aside):
            self.world.scheduler.queues.take_back(request)
        self.world.verify()

    def _write(self, job: Job) -> None:
        size, content, blocks = self.world.scheduler.blocks.block_size, 0, []
        tokens = job.request.tokens(0, (job.first + len(job.slots)) * size)
        for position, token in enumerate(tokens):
            if not position % size:
                blocks.append([])
            content = chain(content, token)
            blocks[-1].append(content)
        for stage in self.world.model.stages:
            for slot, block in zip(job.slots, blocks[job.first :], strict=True):
                stage.host[slot] = list(block)
