"""One fetch: chunks of a prompt that stores read into slots, a job for each run of chunks in one backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ppengine.core.scheduler.request import Request
from ppengine.core.tiers.chunks import Chunk
from ppengine.core.tiers.jobs import Job, Jobs
from ppengine.core.tiers.open_pools import OpenPools, Send
from ppengine.protocol.store_messages import Fetch, Fetched, FoundChunk

MARGIN_S = 0.05
"""Seconds by which stores end a fetch before the core does, so that its first chunks count."""
LATE = 2.0
"""Factor by which a fetch that did not end in time is taken to need longer."""


@dataclass(eq=False, slots=True)
class Run:
    """Consecutive chunks of a prompt in one backend: one job of the stores of all places."""

    backend: str
    chunks: list[Chunk]
    found: list[FoundChunk]
    slots: list[list[int]] = field(default_factory=list)
    """Slots of each chunk."""
    size: int = 0
    """Bytes of the place with the most."""
    ahead: int = 0
    """Bytes of other fetches that were in front of it."""
    job: Job | None = None
    good: int = 0
    """Chunks that are whole in their slots on all places."""

    @property
    def all_slots(self) -> list[int]:
        """Slots of all chunks."""
        return [slot for slots in self.slots for slot in slots]

    def ask(self, pools: OpenPools, jobs: Jobs, send: Send, seconds: float, end: Callable[[Job], None]) -> None:
        """Let the stores of all places read the chunks into `slots`, which are free again when all have answered."""

        def settled(_: Job) -> None:
            pools.host.release(self.all_slots)
            self.slots = []

        slots = len(self.all_slots)
        self.job = job = jobs.open(pools.places, seconds, end, settled, backend=self.backend, slots=slots)
        left_ms = max(1, int((seconds - min(MARGIN_S, seconds / 4)) * 1e3))
        keys = [chunk.key for chunk in self.chunks]
        for number, place in enumerate(pools.places):
            sums = [one.marker.sums[number] for one in self.found]
            send(place, Fetch(job.number, pools.generation, self.backend, keys, self.slots, sums, left_ms))

    def leave_slots(self, pools: OpenPools) -> None:
        """At the end of the job: put slots that a store may still write into quarantine."""
        if self.job is not None and self.job.owed and self.slots:
            pools.host.quarantine(self.all_slots)

    def sample_s(self, now: float) -> float | None:
        """Return the seconds that say something about the backend: of a whole run, or more than one in time."""
        assert self.job is not None, "a run is measured when its job has ended"
        if self.good == len(self.chunks):
            return now - self.job.began
        return LATE * (now - self.job.began) if now >= self.job.deadline else None

    def judge(self, places: int) -> None:
        """Set the number of good chunks: the least of all places, none if one has not answered."""
        assert self.job is not None, "a run is judged when its job has ended"
        answers = [answer for answer in self.job.answers.values() if isinstance(answer, Fetched)]
        counts = [answer.good for answer in answers]
        self.good = max(0, min(counts)) if len(counts) == places else 0
        self.good = min(self.good, len(self.chunks))

    @property
    def failures(self) -> list[tuple[Chunk, Fetched]]:
        """Chunks at which a place has failed, with its answer."""
        assert self.job is not None, "a run fails by its job"
        return [
            (self.chunks[answer.good], answer)
            for _, answer in sorted(self.job.answers.items())
            if isinstance(answer, Fetched) and answer.error and 0 <= answer.good < len(self.chunks)
        ]


@dataclass(eq=False, slots=True)
class FetchUnderWay:
    """The fetch of a request."""

    request: Request
    digests: list[bytes]
    """Digests of all whole chunks of the prompt, block by block."""
    first: int
    """Number of the first chunk that is fetched."""
    runs: list[Run]
    began: float
    deadline: float
    kept: list[int]
    """Host slots of the prefix before it, pinned."""
    left: int = 0
    """Runs without an end."""

    @property
    def chunks(self) -> int:
        """Number of chunks that are fetched."""
        return sum(len(run.chunks) for run in self.runs)

    @property
    def good(self) -> int:
        """Chunks of the prefix that all places have."""
        count = 0
        for run in self.runs:
            count += run.good
            if run.good < len(run.chunks):
                break
        return count

    @property
    def backends(self) -> str:
        """Names of its backends in words."""
        return " and ".join(dict.fromkeys(run.backend for run in self.runs))


def runs_of(chunks: Sequence[Chunk], found: Sequence[FoundChunk]) -> list[Run]:
    """Return the runs of chunks that are in one backend each."""
    runs: list[Run] = []
    for chunk, one in zip(chunks, found, strict=False):
        if not runs or runs[-1].backend != one.backend:
            runs.append(Run(one.backend, [], []))
        runs[-1].chunks.append(chunk)
        runs[-1].found.append(one)
    return runs


def digests_of(chunks: Sequence[Chunk]) -> list[bytes]:
    """Return the digests of the blocks of chunks, in order."""
    return [digest for chunk in chunks for digest in chunk.digests]


def sizes_of(pools: OpenPools, found: Sequence[FoundChunk]) -> dict[str, int]:
    """Return the bytes of chunks at the place with the most, by backend."""
    sizes: dict[str, int] = {}
    for one in found:
        sizes[one.backend] = sizes.get(one.backend, 0) + pools.size_of(1)
    return sizes


def ms_text(seconds: float | None) -> str:
    """Return a time in words."""
    return "unknown" if seconds is None else f"{seconds * 1e3:.0f} ms"


def why_less(fetch: FetchUnderWay) -> str:
    """Return why a fetch has brought less than was found."""
    for run in fetch.runs:
        if run.good == len(run.chunks):
            continue
        failed = [answer for answer in run.job.answers.values() if isinstance(answer, Fetched)] if run.job else []
        first = min((answer for answer in failed if answer.error), key=lambda answer: answer.good, default=None)
        if first is not None:
            return f"stage {first.stage}: {first.error}"
        return run.job.why if run.job is not None and run.job.why else "a store has fewer"
    return ""


def why_waits(pools: OpenPools, fetch: FetchUnderWay, now: float) -> str:
    """Return from where a request gets chunks, which ones, and for how long; narrow tables show the beginning."""
    owed = sorted({place.stage for run in fetch.runs if run.job is not None for place in run.job.owed})
    last = f"stage {owed[0]} last, " if len(owed) == 1 and len(pools.places) > 1 else ""
    total = len(fetch.digests) // pools.chunk_blocks
    ages = f"{(now - fetch.began) * 1e3:.0f} of {(fetch.deadline - fetch.began) * 1e3:.0f} ms"
    return f"{fetch.backends}: {fetch.chunks} of {total} chunks, {last}{ages}"
