"""Fetching: chunks of a prompt go from backends into host slots, if that is predicted to be faster than computing them.

A request is set aside as `fetching` until all stores have answered, and for `tiers.fetch_ms` at the latest. It then
goes on with the prefix that all places have. A fetch that failed is never repeated for the same request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ppengine.core.events import Events
from ppengine.core.scheduler.request import Request
from ppengine.core.tiers.backends import Backends
from ppengine.core.tiers.chunks import Chunk
from ppengine.core.tiers.fetch_costs import Costs
from ppengine.core.tiers.fetch_under_way import (
    FetchUnderWay,
    Run,
    digests_of,
    ms_text,
    runs_of,
    sizes_of,
    why_less,
    why_waits,
)
from ppengine.core.tiers.jobs import Job, Jobs
from ppengine.core.tiers.kept_prefixes import KeptPrefixes
from ppengine.core.tiers.known_chunks import KnownChunks
from ppengine.core.tiers.open_pools import OpenPools, Send
from ppengine.core.tiers.rate_trials import RateTrials
from ppengine.protocol.store_messages import Delete, FoundChunk


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request that is `fetching` and whose fetch was not begun."""

    request: Request
    chunks: list[Chunk]
    """Whole chunks of its prompt."""
    began: float
    deadline: float


@dataclass(eq=False)
class PrefixFetcher:
    """Carries out at most `tiers.fetches` fetches at once, in order of admission."""

    _known: KnownChunks
    _jobs: Jobs
    _costs: Costs
    _backends: Backends
    _kept: KeptPrefixes
    _send: Send
    _event: Events
    _fetch_s: float
    _most: int
    _least_tokens: int
    _clock: Callable[[], float]
    failed_total: int = field(init=False, default=0)
    """Fetches that brought less than was found."""
    _line: deque[_Waiting] = field(init=False, default_factory=deque)
    _open: dict[Request, FetchUnderWay] = field(init=False, default_factory=dict)
    _under_way: dict[bytes, FetchUnderWay] = field(init=False, default_factory=dict)
    """Fetches by the keys of their chunks."""
    _behind: dict[FetchUnderWay, list[_Waiting]] = field(init=False, default_factory=dict)
    """Requests that need chunks of a fetch under way."""
    _trials: RateTrials = field(init=False)

    def __post_init__(self) -> None:
        self._trials = RateTrials(
            self._jobs, self._costs, self._backends, self._kept, self._send, self._note_failures, self._fetch_s,
            self._clock,
        )  # fmt: skip

    def queue(self, pools: OpenPools, request: Request, chunks: list[Chunk]) -> None:
        """Set a request aside whose next chunks are known to be there, unless computing them is faster."""
        now, queues = self._clock(), pools.scheduler.queues
        waiting = _Waiting(request, chunks, now, now + self._fetch_s)
        first, found = self._found(pools, waiting)
        self._measure(pools, chunks[first:])
        if not found or not self._worth(pools, request, chunks[first:], found):
            if request in queues.aside:
                queues.take_back(request)
            return
        before = request.state
        text = f"waits for one of {self._most} fetches"
        queues.set_aside(request, "fetching", text)
        request.note(now, f"{before} > fetching, {len(found)} of {len(chunks)} chunks are in {found[0].backend}")
        self._line.append(waiting)
        self.advance(pools)

    def advance(self, pools: OpenPools) -> None:
        """End fetches of requests that have ended, and begin those whose turn it is."""
        now, aside = self._clock(), pools.scheduler.queues.aside
        for fetch in [fetch for request, fetch in self._open.items() if request not in aside]:
            self._cancel(fetch, "the request has gone on")
        while self._line and (self._line[0].deadline <= now or self._line[0].request not in aside):
            self._take_back(pools, self._line.popleft(), "no turn in time")
        for fetch, waiting in self._behind.items():
            late = [one for one in waiting if one.deadline <= now]
            self._behind[fetch] = [one for one in waiting if one.deadline > now]
            for one in late:
                self._take_back(pools, one, "another request's fetch did not end in time")
        while self._line and len(self._open) < self._most:
            first = self._line.popleft()
            if not self._begin(pools, first):
                self._line.appendleft(first)
                break

    def stop(self, pools: OpenPools | None, why: str) -> None:
        """End all fetches: their slots go to quarantine, and their requests go on without them."""
        self._trials.stop(why)
        line, self._line = [*self._line, *(one for each in self._behind.values() for one in each)], deque()
        for behind in self._behind.values():
            behind.clear()
        for fetch in list(self._open.values()):
            self._cancel(fetch, why)
        if pools is not None:
            for waiting in line:
                self._take_back(pools, waiting, why)

    @property
    def next_deadline(self) -> float | None:
        """First deadline of a request whose fetch was not begun; None without one."""
        behind = (one.deadline for each in self._behind.values() for one in each)
        first = [self._line[0].deadline] if self._line else []
        return min([*first, *behind], default=None)

    def explain(self, pools: OpenPools) -> None:
        """Renew the reasons why requests wait, as of now."""
        now = self._clock()
        for request, fetch in self._open.items():
            if request in pools.scheduler.queues.aside:
                pools.scheduler.queues.set_aside(request, "fetching", why_waits(pools, fetch, now))

    # --- beginning ------------------------------------------------------------------------------------------

    def _found(self, pools: OpenPools, waiting: _Waiting) -> tuple[int, list[FoundChunk]]:
        """Return the number of the first chunk to fetch, and the chunks from there that are in backends."""
        digests = digests_of(waiting.chunks)
        first = pools.present(digests)[0] // pools.chunk_blocks
        chunks = waiting.chunks[first:]
        found = self._there(pools, chunks, self._backends.readable())
        tokens = (first + len(found)) * pools.chunk_tokens
        return first, found if tokens >= self._least_tokens else []

    def _there(self, pools: OpenPools, chunks: Sequence[Chunk], backends: list[str]) -> list[FoundChunk]:
        """Return the first chunks that are known to be in `backends`."""
        backends = self._costs.cheapest_first(backends, pools.size_of(len(chunks)))
        known = self._known.lookup([chunk.key for chunk in chunks], backends)
        found: list[FoundChunk] = []
        for chunk, one in zip(chunks, known.chunks, strict=False):
            marker = one.marker
            if len(marker.sums) != len(pools.places) or marker.blocks != pools.chunk_blocks:
                self._known.missed(chunk.key, one.backend)
                self._delete(pools, one.backend, chunk.key)
                break
            found.append(one)
        return found

    def _measure(self, pools: OpenPools, chunks: Sequence[Chunk]) -> None:
        """Let backends be measured whose rate is not known, before a request waits for them."""
        for backend in self._backends.readable():
            if not self._costs.measured(backend) and (found := self._there(pools, chunks, [backend])):
                self._trials.begin(pools, chunks, found)

    def _worth(
        self, pools: OpenPools, request: Request, chunks: Sequence[Chunk], found: Sequence[FoundChunk]
    ) -> bool:  # fmt: skip
        """Return whether a fetch of `found`, the first of `chunks`, is predicted to be faster; note it if it is not."""
        decision = self._costs.decide(sizes_of(pools, found), len(found) * pools.chunk_tokens)
        if decision.fetch:
            return True
        if decision.trial:
            run = runs_of(chunks, found)[0]
            self._trials.begin(pools, run.chunks, run.found)
        backend = self._backends.get(found[0].backend)
        if backend is not None:
            backend.declined += 1
        text = f"{len(found)} chunks in {found[0].backend} are computed: {ms_text(decision.compute_s)} predicted"
        request.note(self._clock(), f"{text}, {ms_text(decision.fetch_s)} for a fetch")
        return False

    def _begin(self, pools: OpenPools, waiting: _Waiting) -> bool:
        """Begin a fetch, or let its request go on; return False if it waits for slots of those before it."""
        request = waiting.request
        if request not in pools.scheduler.queues.aside:
            return True
        first, found = self._found(pools, waiting)
        chunks = waiting.chunks[first : first + len(found)]
        if not found:
            self._take_back(pools, waiting, "its chunks have been fetched, or are gone")
            return True
        if (owner := self._under_way.get(chunks[0].key)) is not None:
            self._behind[owner].append(waiting)
            pools.scheduler.queues.set_aside(request, "fetching", f"behind the fetch of {owner.request.id}")
            return True
        free = next((number for number, chunk in enumerate(chunks) if chunk.key in self._under_way), len(chunks))
        chunks, found = chunks[:free], found[:free]
        if not self._worth(pools, request, chunks, found):
            self._take_back(pools, waiting, "computed")
            return True
        slots = self._reserve(pools, waiting, len(chunks))
        if slots:
            self._start(pools, waiting, first, slots, runs_of(chunks[: len(slots)], found))
        elif self._kept.busy(pools):
            # The prediction has counted the fetches before it, and their requests start soon.
            pools.scheduler.queues.set_aside(request, "fetching", "waits for host slots of the fetches before it")
            return False
        else:
            self._take_back(pools, waiting, "no host slots are free")
        return True

    def _reserve(self, pools: OpenPools, waiting: _Waiting, chunks: int) -> list[list[int]]:
        """Return slots for as many chunks as there is room for; the prefix before them stays as it is."""
        kept = pools.present(digests_of(waiting.chunks))[1]
        pools.host.pin(kept)
        size = pools.chunk_blocks
        most = min(chunks, self._kept.room(pools) // size)
        slots = pools.host.reserve(most * size) if most else None
        while slots is None and (most := most // 2):
            slots = pools.host.reserve(most * size)
        pools.host.unpin(kept)
        return [] if slots is None else [slots[at : at + size] for at in range(0, len(slots), size)]

    def _start(
        self, pools: OpenPools, waiting: _Waiting, first: int, slots: list[list[int]], runs: list[Run]
    ) -> None:  # fmt: skip
        now, digests = self._clock(), digests_of(waiting.chunks)
        kept = pools.present(digests)[1]
        pools.host.pin(kept)
        fetch = FetchUnderWay(waiting.request, digests, first, runs, waiting.began, waiting.deadline, kept, len(runs))
        self._open[waiting.request], self._behind[fetch] = fetch, []
        for run in runs:
            run.slots, slots = slots[: len(run.chunks)], slots[len(run.chunks) :]
            run.size, run.ahead = pools.size_of(len(run.chunks)), self._costs.ahead(run.backend)
            self._costs.begun(run.backend, run.size)
            self._backends.note_read(run.backend)
            self._under_way.update(dict.fromkeys((chunk.key for chunk in run.chunks), fetch))
        for run in runs:
            seconds = max(waiting.deadline - now, 1e-3)
            run.ask(pools, self._jobs, self._send, seconds, partial(self._run_ended, pools, fetch, run))
        pools.scheduler.queues.set_aside(waiting.request, "fetching", why_waits(pools, fetch, now))

    # --- ending ---------------------------------------------------------------------------------------------

    def _cancel(self, fetch: FetchUnderWay, why: str) -> None:
        for run in fetch.runs:
            if run.job is not None:
                self._jobs.cancel(run.job, why)

    def _run_ended(self, pools: OpenPools, fetch: FetchUnderWay, run: Run, job: Job) -> None:
        """Enter the good chunks of a run; with the last run, let the request go on."""
        run.judge(len(pools.places))
        now = self._clock()
        self._costs.ended(run.backend, run.size, run.sample_s(now), run.ahead)
        for chunk in run.chunks:
            del self._under_way[chunk.key]
        self._note_failures(pools, run)
        if job.owed:
            run.leave_slots(pools)
        else:
            self._fill(pools, run)
        fetch.left -= 1
        if not fetch.left:
            self._end(pools, fetch)

    def _fill(self, pools: OpenPools, run: Run) -> None:
        """Enter the slots of good chunks into the host cache, and free the others."""
        slots, run.slots = run.slots, []
        for chunk, ids in zip(run.chunks[: run.good], slots, strict=False):
            for slot, digest in zip(ids, chunk.digests, strict=True):
                pools.host.enter(slot, digest)
        for ids in slots[run.good :]:
            pools.host.release(ids)

    def _note_failures(self, pools: OpenPools, run: Run) -> None:
        """Forget chunks that could not be read; those that are corrupt or lack a shard are deleted everywhere."""
        for chunk, answer in run.failures:
            self._known.missed(chunk.key, run.backend)
            if answer.corrupt or answer.missing:
                self._delete(pools, run.backend, chunk.key)
            if answer.corrupt:
                text = f"{run.backend}: chunk {chunk.key.hex()[:12]} of stage {answer.stage} is deleted: {answer.error}"
                self._event("store.corrupt", text, stage=answer.stage)

    def _delete(self, pools: OpenPools, backend: str, key: bytes) -> None:
        for place in pools.places:
            self._send(place, Delete(backend, [key]))

    def _end(self, pools: OpenPools, fetch: FetchUnderWay) -> None:
        """Let the request of a fetch go on, and those behind it be looked at again."""
        request, queues, now = fetch.request, pools.scheduler.queues, self._clock()
        del self._open[request]
        self.failed_total += fetch.good < fetch.chunks
        self._line.extendleft(reversed(self._behind.pop(fetch)))
        if request in queues.aside and fetch.good:
            self._kept.keep(pools, request, fetch)
        if fetch.kept:
            pools.host.unpin(fetch.kept)
        if request in queues.aside:
            why = "" if fetch.good == fetch.chunks else f": {why_less(fetch)}"
            took = f"{(now - fetch.began) * 1e3:.0f} ms"
            text = f"{fetch.good} of {fetch.chunks} chunks from {fetch.backends} in {took}{why}"
            request.note(now, f"fetching > waiting, {text}")
            queues.take_back(request)

    def _take_back(self, pools: OpenPools, waiting: _Waiting, why: str) -> None:
        if waiting.request in pools.scheduler.queues.aside:
            now = self._clock()
            waiting.request.note(now, f"fetching > waiting after {(now - waiting.began) * 1e3:.0f} ms: {why}")
            pools.scheduler.queues.take_back(waiting.request)
