"""Finding: which chunks of a new request's prompt are in backends. Most prompts need no question.

A request that needs one is set aside as `finding` and goes on after `tiers.find_ms` at the latest. Others may begin
before it meanwhile; its place in the waiting queue stays that of its arrival.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ppengine.common.back_off import pause_s
from ppengine.core.scheduler.request import Request
from ppengine.core.tiers.backends import Backends
from ppengine.core.tiers.chunks import Chunk
from ppengine.core.tiers.jobs import Job, Jobs
from ppengine.core.tiers.known_chunks import KnownChunks
from ppengine.core.tiers.open_pools import FIRST, OpenPools, Send
from ppengine.core.tiers.prefix_fetcher import PrefixFetcher
from ppengine.protocol.store_messages import Find, Found

FINDS_MOST = 16
"""Questions that are open at once; other requests wait for their turn, with their deadline."""
KEYS_MOST = 1024
"""Chunks of one question; prompts of more than 262,144 tokens begin with as many."""
FAILURES_MOST = 3
"""Questions without an answer in a row, until none is asked for a while."""
REST_S, REST_MOST_S = 2.0, 60.0
"""Seconds of that while: they double up to the most."""


@dataclass(eq=False, slots=True)
class _Search:
    """A request that is `finding`."""

    request: Request
    chunks: list[Chunk]
    """Whole chunks of its prompt."""
    unknown: int
    """Those behind the prefix in tier 1."""
    began: float
    deadline: float


@dataclass(eq=False)
class PrefixFinder:
    """Asks the store of place (0, 0), at most `FINDS_MOST` questions at once."""

    _known: KnownChunks
    _jobs: Jobs
    _fetcher: PrefixFetcher
    _backends: Backends
    _send: Send
    _find_s: float
    _clock: Callable[[], float]
    _looked: Callable[[float], None]
    """Called with the seconds that a request was `finding`, at its end."""
    _line: deque[_Search] = field(init=False, default_factory=deque)
    """Requests whose question was not asked, in order of admission and so of their deadlines."""
    _open: dict[_Search, Job] = field(init=False, default_factory=dict)
    _failures: int = field(init=False, default=0)
    """Questions without an answer in a row."""
    _rest_until: float = field(init=False, default=0.0)

    def consider(self, pools: OpenPools, request: Request) -> None:
        """Set a new request aside if its prompt has a chunk that may be in a backend."""
        if request.scores_prompt:
            return  # It computes all of its prompt.
        blocks = pools.scheduler.blocks
        digests = request.full_digests((request.num_tokens - 1) // blocks.block_size, blocks.block_size)
        chunks, usable = pools.chunks_of(digests), self._backends.readable()
        first = pools.present(digests)[0] // pools.chunk_blocks
        if first >= len(chunks) or not usable:
            return
        known = self._known.lookup([chunk.key for chunk in chunks[first:]], usable)
        if known.ends:
            if known.chunks:
                self._fetcher.queue(pools, request, chunks)
            return
        now = self._clock()
        if now < self._rest_until:
            if known.chunks:
                self._fetcher.queue(pools, request, chunks)
            return
        search = _Search(request, chunks, len(chunks) - first, now, now + self._find_s)
        request.note(now, f"waiting > finding, {search.unknown} chunks")
        pools.scheduler.queues.set_aside(request, "finding", _why(search, now))
        self._line.append(search)
        self.advance(pools)

    def advance(self, pools: OpenPools) -> None:
        """Let requests go on that are past their deadline or have ended, and ask further questions."""
        now, aside = self._clock(), pools.scheduler.queues.aside
        for search in [search for search in self._open if search.request not in aside]:
            self._jobs.cancel(self._open[search], "the request has gone on")
        while self._line and (self._line[0].deadline <= now or self._line[0].request not in aside):
            self._go_on(pools, self._line.popleft(), "no answer in time")
        while self._line and len(self._open) < FINDS_MOST:
            self._ask(pools, self._line.popleft())

    def stop(self, pools: OpenPools | None, why: str) -> None:
        """Let all requests go on without an answer."""
        searches, self._line = [*self._open, *self._line], deque()
        jobs, self._open = list(self._open.values()), {}
        for job in jobs:
            self._jobs.cancel(job, why)
        for search in searches:
            self._looked(self._clock() - search.began)
            if pools is not None:
                self._give_up(pools, search, why)

    def explain(self, pools: OpenPools) -> None:
        """Renew the reasons why requests wait, as of now."""
        now, queues = self._clock(), pools.scheduler.queues
        for search in (*self._open, *self._line):
            if search.request.state == "finding":
                queues.set_aside(search.request, "finding", _why(search, now))

    @property
    def next_deadline(self) -> float | None:
        """First deadline of a request whose question was not asked; None without one."""
        return self._line[0].deadline if self._line else None

    def wake(self) -> None:
        """Ask again: a backend or a store was changed."""
        self._failures, self._rest_until = 0, 0.0

    def _ask(self, pools: OpenPools, search: _Search) -> None:
        now = self._clock()
        first = pools.present([digest for chunk in search.chunks for digest in chunk.digests])[0] // pools.chunk_blocks
        keys = [chunk.key for chunk in search.chunks[first:]][:KEYS_MOST]
        if (
            search.request not in pools.scheduler.queues.aside
            or self._known.lookup(keys, self._backends.readable()).ends
        ):
            # An answer to another request has been about the same chunks.
            self._go_on(pools, search, "")
            return
        left = max(search.deadline - now, 1e-3)
        job = self._jobs.open([FIRST], left, partial(self._ended, pools, search, keys), partial(self._settled, keys))
        self._open[search] = job
        self._send(FIRST, Find(job.number, keys, max(1, int(left * 1e3))))

    def _ended(self, pools: OpenPools, search: _Search, keys: list[bytes], job: Job) -> None:
        """Go on with a request whose question has ended."""
        answer = job.answers.get(FIRST)
        if isinstance(answer, Found):
            self._failures = 0
            self._take(keys, answer)
        elif search in self._open and search.request in pools.scheduler.queues.aside:
            self._failures += 1
            if self._failures >= FAILURES_MOST:
                rest_s = pause_s(REST_S, REST_MOST_S, self._failures - FAILURES_MOST + 1)
                self._rest_until = self._clock() + rest_s
        if self._open.pop(search, None) is not None:
            why = answer.error if isinstance(answer, Found) else job.why
            self._go_on(pools, search, why)

    def _settled(self, keys: list[bytes], job: Job) -> None:
        """Take an answer that came after the deadline: it is as good for later requests."""
        answer = job.answers.get(FIRST)
        if job.why and isinstance(answer, Found):
            self._take(keys, answer)

    def _take(self, keys: list[bytes], answer: Found) -> None:
        if not answer.error:
            self._known.found(keys, answer.chunks)

    def _go_on(self, pools: OpenPools, search: _Search, why: str) -> None:
        """Fetch the chunks that are there, or let the request wait for its turn."""
        request = search.request
        self._looked(self._clock() - search.began)
        if request not in pools.scheduler.queues.aside:
            return
        digests = [digest for chunk in search.chunks for digest in chunk.digests]
        first = pools.present(digests)[0] // pools.chunk_blocks
        if self._known.lookup([chunk.key for chunk in search.chunks[first:]], self._backends.readable()).chunks:
            self._fetcher.queue(pools, request, search.chunks)
        else:
            self._give_up(pools, search, why or "no chunk is there")

    def _give_up(self, pools: OpenPools, search: _Search, why: str) -> None:
        queues, now = pools.scheduler.queues, self._clock()
        if search.request in queues.aside:
            search.request.note(now, f"finding > waiting after {(now - search.began) * 1e3:.0f} ms: {why}")
            queues.take_back(search.request)


def _why(search: _Search, now: float) -> str:
    """Return which chunks a request asks about, where, and for how long."""
    ages = f"{(now - search.began) * 1e3:.0f} of {(search.deadline - search.began) * 1e3:.0f} ms"
    return f"asks the store of stage 0 about {search.unknown} chunks, {ages}"
