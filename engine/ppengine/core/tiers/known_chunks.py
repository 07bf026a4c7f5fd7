"""Memory of the chunks that are in backends, and of some that are not: most prompts need no question."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ppengine.protocol.store_messages import FoundChunk

PRESENT_MOST = 100_000
"""Chunks that are known to be there; some 100 bytes each."""
ABSENT_MOST = 100_000
ABSENT_S = 10.0
"""Seconds after which a chunk that was not there is looked for again: another engine may have put it."""


class Known(NamedTuple):
    """The part of a prompt about which no question is needed."""

    chunks: list[FoundChunk]
    """Chunks of the longest prefix that are there."""
    ends: bool
    """Whether the next chunk is known to be absent, or there is none."""


@dataclass(eq=False)
class KnownChunks:
    """Keeps both sorts, the least recently used going first."""

    _clock: Callable[[], float]
    _present_most: int = PRESENT_MOST
    _present: OrderedDict[bytes, tuple[FoundChunk, ...]] = field(init=False, default_factory=OrderedDict)
    """Backends of each chunk: one of them may be paused or broken."""
    _absent: OrderedDict[bytes, float] = field(init=False, default_factory=OrderedDict)
    """Time at which each is forgotten; in this order, too."""

    def __len__(self) -> int:
        return len(self._present) + len(self._absent)

    def has(self, key: bytes, backend: str) -> bool:
        """Return whether a chunk is known to be in a backend."""
        return any(one.backend == backend for one in self._present.get(key, ()))

    def lookup(self, keys: Sequence[bytes], usable: Sequence[str]) -> Known:
        """Return the known prefix of `keys`. `usable`: names of backends that may be read, the best one first."""
        chunks: list[FoundChunk] = []
        for key in keys:
            there = [one for one in self._present.get(key, ()) if one.backend in usable]
            if not there:
                # Nothing may be read, or a question is needed: a backend that may be read can have it, too.
                return Known(chunks, not usable or self.absent(key))
            self._present.move_to_end(key)
            chunks.append(min(there, key=lambda one: usable.index(one.backend)))
        return Known(chunks, True)

    def found(self, keys: Sequence[bytes], chunks: Sequence[FoundChunk]) -> None:
        """Take an answer about `keys`: `chunks` are the prefix that is there, and the next one is not."""
        for key, chunk in zip(keys, chunks, strict=False):
            self.put(key, chunk)
        if len(chunks) < len(keys):
            self._note_absent(keys[len(chunks)])

    def put(self, key: bytes, chunk: FoundChunk) -> None:
        """Note a chunk that is there; this replaces an older marker of the same backend."""
        self._absent.pop(key, None)
        others = [one for one in self._present.get(key, ()) if one.backend != chunk.backend]
        self._present[key] = (*others, chunk)
        self._present.move_to_end(key)
        if len(self._present) > self._present_most:
            self._present.popitem(last=False)

    def missed(self, key: bytes, backend: str) -> None:
        """Note that a chunk could not be read from a backend: it counts as absent for a while, if no other has it."""
        self._drop(key, backend)
        if key not in self._present:
            self._note_absent(key)

    def drop_backend(self, backend: str) -> None:
        """Forget the chunks of a backend, and those that were not there: another backend may have them."""
        for key in list(self._present):
            self._drop(key, backend)
        self._absent.clear()

    def _drop(self, key: bytes, backend: str) -> None:
        others = tuple(one for one in self._present.get(key, ()) if one.backend != backend)
        if others:
            self._present[key] = others
        else:
            self._present.pop(key, None)

    def forget_absent(self) -> None:
        """Forget which chunks were not there."""
        self._absent.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._present.clear()
        self._absent.clear()

    def absent(self, key: bytes) -> bool:
        """Return whether a chunk was not there a moment ago."""
        until = self._absent.get(key)
        if until is None:
            return False
        if self._clock() < until:
            return True
        del self._absent[key]
        return False

    def _note_absent(self, key: bytes) -> None:
        self._absent[key] = self._clock() + ABSENT_S
        self._absent.move_to_end(key)
        if len(self._absent) > ABSENT_MOST:
            self._absent.popitem(last=False)
