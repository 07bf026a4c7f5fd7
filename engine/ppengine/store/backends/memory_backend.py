"""Objects in the memory of the store process; they end with it."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from ppengine.store.backend import Backend, BackendError, BackendOptions, Layout, Usage
from ppengine.store.lru_index import LruIndex

OWN_PAGES_BYTES = 64 * 1024
"""Least size of an object with memory pages of its own. They go back to the system with it.

glibc would keep up to 64 MiB of freed objects for each thread that wrote some, after the backend is gone.
"""


class MemoryBackend(Backend):
    """A dictionary with a quota."""

    threads: ClassVar[int] = 2

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, bytes | mmap.mmap] = {}
        self._index = LruIndex()
        self._evicted = 0
        self._quota = 0

    @override
    def open(self, config: BackendOptions, layout: Layout) -> None:
        if config.url:
            raise BackendError("kind memory has no url: its objects are in the store process")
        self._quota = config.quota_bytes

    @override
    def find(self, keys: Sequence[str]) -> list[bool]:
        return [key in self._objects for key in keys]

    @override
    def read(self, key: str, into: memoryview) -> int:
        with self._lock:
            data = self._objects[key]
            self._index.touch(key)
            # In the lock: a writer may take the pages of an object that it evicts.
            if len(data) <= len(into):
                into[: len(data)] = memoryview(data)
        return len(data)

    @override
    def write(self, key: str, data: memoryview) -> None:
        if len(data) > self._quota:
            raise BackendError(f"an object has {len(data)} bytes, the quota is {self._quota}")
        with self._lock:
            freed = [self._forget(key)]
            for old in self._index.oldest(len(data), self._quota):
                freed.append(self._forget(old))
                self._evicted += 1
            self._objects[key] = _copy(data, freed)
            self._index.put(key, len(data))

    @override
    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                for each in self._index.below(key) if key.endswith("/") else [key]:
                    self._forget(each)

    @override
    def usage(self) -> Usage:
        return Usage(self._index.used_bytes, self._evicted)

    @override
    def close(self) -> None:
        self._objects.clear()
        self._index.replace([])

    def _forget(self, key: str) -> bytes | mmap.mmap | None:
        self._index.remove(key)
        return self._objects.pop(key, None)


def _copy(data: memoryview, freed: Sequence[bytes | mmap.mmap | None]) -> bytes | mmap.mmap:
    """Return a copy, in the pages of a freed object of the same size if there is one: new pages cost more than it."""
    if len(data) < OWN_PAGES_BYTES:
        return bytes(data)
    same = (each for each in freed if isinstance(each, mmap.mmap) and len(each) == len(data))
    pages = next(same, None) or mmap.mmap(-1, len(data), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages[:] = data
    return pages
