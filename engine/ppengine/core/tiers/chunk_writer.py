"""Writing: chunks whose blocks are all in host slots go to backends, each by its `write`. It delays nothing.

Every store writes its shard. Once all have, the store of place (0, 0) writes the marker: without it there is no chunk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ppengine.core.scheduler.request import Request
from ppengine.core.tiers.backends import Backend, Backends
from ppengine.core.tiers.chunks import Chunk
from ppengine.core.tiers.jobs import Job, Jobs
from ppengine.core.tiers.known_chunks import KnownChunks
from ppengine.core.tiers.open_pools import FIRST, OpenPools, Send
from ppengine.protocol.store_messages import Delete, Done, Find, Found, FoundChunk, Mark, Marker, Put, Stored

PUTS_MOST = 8
"""Chunks that are being written at once."""
SHARE = 0.25
"""Most of the host slots that puts keep as they are."""
CANDIDATES_MOST = 1024
"""Chunks that wait until their blocks are in slots; further ones are dropped."""
WAIT_S = 60.0
"""Seconds for that."""
KNOWN_MOST = 100_000
"""Chunks whose uses are counted, or whose blocks are known."""
LOOK_S = 0.02
"""Seconds between two looks at the candidates."""
LOOKS_MOST = 16
"""Candidates of one look."""

Key = TypeVar("Key")
Value = TypeVar("Value")
Name = tuple[str, bytes]
"""A backend and the key of a chunk."""


@dataclass(eq=False, slots=True)
class _Candidate:
    """A chunk that a backend gets when its blocks are in slots."""

    chunk: Chunk
    until: float


@dataclass(eq=False)
class ChunkWriter:
    """Counts uses of chunks and writes them."""

    _known: KnownChunks
    _jobs: Jobs
    _backends: Backends
    _send: Send
    _clock: Callable[[], float]
    dropped_total: int = field(init=False, default=0)
    """Chunks that should have been written and were not."""
    _uses: OrderedDict[bytes, int] = field(init=False, default_factory=OrderedDict)
    _candidates: OrderedDict[Name, _Candidate] = field(init=False, default_factory=OrderedDict)
    _members: OrderedDict[bytes, Chunk] = field(init=False, default_factory=OrderedDict)
    """Chunks by the digests of their blocks, for backends that get evicted ones."""
    _open: set[Name] = field(init=False, default_factory=set)
    _whole: list[tuple[Name, float, Marker]] = field(init=False, default_factory=list)
    """Chunks whose shards are all written, with the seconds for the marker, until the next turn."""
    _pools: OpenPools | None = field(init=False, default=None)
    """Slots of the newest turn; None: they serve no longer."""
    _look_at: float = field(init=False, default=0.0)

    # --- uses -----------------------------------------------------------------------------------------------

    def used(self, pools: OpenPools, request: Request, first: int = 0) -> None:
        """Note a use of the chunks of a request whose blocks are full, from token `first` on."""
        digests = request.full_digests(request.num_entered, pools.scheduler.blocks.block_size)
        backends = self._backends.wanting()
        evicted = any(one.config.write == "evicted" for one in backends)
        for chunk in pools.chunks_of(digests)[first // pools.chunk_tokens :]:
            uses = self._uses.pop(chunk.key, 0) + 1
            _keep(self._uses, chunk.key, uses)
            if evicted:
                for digest in chunk.digests:
                    _keep(self._members, digest, chunk)
            for one in backends:
                write = one.config.write
                if write == "always" or (write == "reused" and uses > 1):
                    self._want(one.name, chunk)

    def on_evict(self, slot: int, digest: bytes) -> None:
        """Note that a slot is about to be reused: a chunk that was to be written before is dropped."""
        chunk = self._members.pop(digest, None)
        if chunk is None:
            return
        for other in chunk.digests:
            self._members.pop(other, None)
        for one in self._backends.wanting():
            if one.config.write == "evicted" and not self._has((one.name, chunk.key)):
                self.dropped_total += 1

    def _want(self, backend: str, chunk: Chunk) -> None:
        name = backend, chunk.key
        if name in self._candidates or name in self._open or self._has(name):
            return
        if len(self._candidates) >= CANDIDATES_MOST:
            self.dropped_total += 1
            return
        self._candidates[name] = _Candidate(chunk, self._clock() + WAIT_S)

    def _has(self, name: Name) -> bool:
        return self._known.has(name[1], name[0])

    # --- puts -----------------------------------------------------------------------------------------------

    def advance(self, pools: OpenPools) -> None:
        """Have markers written, begin puts of candidates whose blocks are in slots, and rescue those that go."""
        self._pools = pools
        # Not before a turn: only now it is sure that no stage has left the generation of the slots that were read.
        whole, self._whole = self._whole, []
        for name, seconds, marker in whole:
            self._mark(pools, name, seconds, marker)
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        self._look(pools, now)
        if self._members:
            self._rescue(pools)

    def stop(self, pools: OpenPools) -> None:
        """Forget all puts: the stages leave the generation, and slots that are read now may be empty."""
        self._pools = None
        whole, self._whole = self._whole, []
        for name, _, _ in whole:
            self._fail(pools, name)

    def _room(self, pools: OpenPools) -> bool:
        most = max(1, int(pools.scheduler.blocks.host.size * SHARE) // pools.chunk_blocks)
        return len(self._open) < min(PUTS_MOST, most)

    def _look(self, pools: OpenPools, now: float) -> None:
        writable = {one.name: one for one in self._backends.writable()}
        for _ in range(min(LOOKS_MOST, len(self._candidates))):
            if not self._room(pools):
                return
            name, candidate = self._candidates.popitem(last=False)
            if self._has(name):
                continue
            backend, slots = writable.get(name[0]), pools.host.lookup(candidate.chunk.digests)
            if backend is not None and len(slots) == len(candidate.chunk.digests):
                self._ask(pools, backend, candidate.chunk)
            elif candidate.until <= now:
                self.dropped_total += 1
            else:
                self._candidates[name] = candidate

    def _rescue(self, pools: OpenPools) -> None:
        """Write chunks whose slots are the next to be evicted, while few are empty."""
        pool = pools.scheduler.blocks.host
        soon = 2 * PUTS_MOST * pools.chunk_blocks
        if pool.free - len(pool.spare) >= min(soon, pool.size // 4):
            return
        backends = [one for one in self._backends.writable() if one.config.write == "evicted"]
        for _, digest in pools.host.oldest(soon):
            chunk = self._members.get(digest)
            if chunk is None:
                continue
            for backend in backends:
                name = backend.name, chunk.key
                if not self._room(pools) or name in self._open or self._has(name):
                    continue
                slots = pools.host.lookup(chunk.digests)
                if len(slots) == len(chunk.digests):
                    self._ask(pools, backend, chunk)

    def _ask(self, pools: OpenPools, backend: Backend, chunk: Chunk) -> None:
        """Begin a put, after a question if the chunk may be there: other bytes under its marker would look corrupt."""
        self._open.add((backend.name, chunk.key))
        if self._known.absent(chunk.key):
            self._put(pools, backend, chunk)
            return
        seconds = backend.config.timeout_ms / 1e3
        job = self._jobs.open([FIRST], seconds, partial(self._asked, pools, backend, chunk), backend=backend.name)
        self._send(FIRST, Find(job.number, [chunk.key], max(1, int(seconds * 1e3))))

    def _asked(self, pools: OpenPools, backend: Backend, chunk: Chunk, job: Job) -> None:
        name, answer = (backend.name, chunk.key), job.answers.get(FIRST)
        if not isinstance(answer, Found) or answer.error or pools is not self._pools:
            self._open.discard(name)
            self.dropped_total += 1
            return
        for found in answer.chunks[:1]:
            self._known.put(chunk.key, found)
            if found.backend == backend.name:
                self._open.discard(name)
                return
        self._put(pools, backend, chunk)

    def _put(self, pools: OpenPools, backend: Backend, chunk: Chunk) -> None:
        name, seconds = (backend.name, chunk.key), 2 * backend.config.timeout_ms / 1e3
        slots = pools.host.lookup(chunk.digests)
        if len(slots) < len(chunk.digests) or self._backends.get(backend.name) is None:
            self._open.discard(name)
            self.dropped_total += 1
            return
        pools.host.pin(slots)
        self._backends.note_write(backend.name)
        job = self._jobs.open(
            pools.places, seconds, partial(self._stored, pools, name, seconds),
            lambda _: pools.host.unpin(slots), backend=backend.name,
        )  # fmt: skip
        for place in pools.places:
            self._send(
                place, Put(job.number, pools.generation, backend.name, chunk.key, slots, max(1, int(seconds * 1e3)))
            )

    def _stored(self, pools: OpenPools, name: Name, seconds: float, job: Job) -> None:
        """Note a chunk of which all stores have written their shard."""
        answers = [job.answers.get(place) for place in pools.places]
        shards = [one for one in answers if isinstance(one, Stored) and not one.error]
        if job.why or len(shards) < len(pools.places) or pools is not self._pools:
            self._fail(pools, name)
            return
        marker = Marker([one.length for one in shards], [one.sum for one in shards], pools.chunk_blocks)
        self._whole.append((name, seconds, marker))

    def _mark(self, pools: OpenPools, name: Name, seconds: float, marker: Marker) -> None:
        marked = self._jobs.open([FIRST], seconds, partial(self._marked, pools, name, marker), backend=name[0])
        self._send(FIRST, Mark(marked.number, *name, marker, max(1, int(seconds * 1e3))))

    def _marked(self, pools: OpenPools, name: Name, marker: Marker, job: Job) -> None:
        """Note a chunk that is there from here on."""
        answer = job.answers.get(FIRST)
        if not isinstance(answer, Done) or answer.error:
            self._fail(pools, name)
            return
        self._open.discard(name)
        self._known.put(name[1], FoundChunk(name[0], marker))

    def _fail(self, pools: OpenPools, name: Name) -> None:
        self._open.discard(name)
        self.dropped_total += 1
        for place in pools.places:
            self._send(place, Delete(name[0], [name[1]]))

    # --- changes --------------------------------------------------------------------------------------------

    def under_way_of(self, backend: str) -> int:
        """Return the number of chunks that are being written to a backend."""
        return sum(1 for name in self._open if name[0] == backend)

    def drop_candidates(self, backend: str) -> None:
        """Forget the chunks that a backend was to get."""
        for name in [name for name in self._candidates if name[0] == backend]:
            del self._candidates[name]


def _keep(known: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    """Note a value as the newest; beyond the limit the oldest one goes."""
    known[key] = value
    if len(known) > KNOWN_MOST:
        known.popitem(last=False)
