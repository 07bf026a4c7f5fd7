"""Objects in the memory of the store process; they end with it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

from typing_extensions import override

from ppengine.store.backend import Backend, BackendError, BackendOptions, Layout, Usage
from ppengine.store.lru_index import LruIndex


class MemoryBackend(Backend):
    """A dictionary with a quota."""

    threads: ClassVar[int] = 2

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, bytes] = {}
        self._index = LruIndex()
        self._evicted = 0
        self._quota = 0

    @override
    def open(self, config: BackendOptions, layout: Layout) -> None:
        self._quota = config.quota_bytes

    @override
    def find(self, keys: Sequence[str]) -> list[bool]:
        return [key in self._objects for key in keys]

    @override
    def read(self, key: str, into: memoryview) -> int:
        with self._lock:
            data = self._objects[key]
            self._index.touch(key)
        if len(data) <= len(into):
            into[: len(data)] = data
        return len(data)

    @override
    def write(self, key: str, data: memoryview) -> None:
        if len(data) > self._quota:
            raise BackendError(f"an object has {len(data)} bytes, the quota is {self._quota}")
        copy = bytes(data)
        with self._lock:
            self._forget(key)
            for old in self._index.oldest(len(copy), self._quota):
                self._forget(old)
                self._evicted += 1
            self._objects[key] = copy
            self._index.put(key, len(copy))

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

    def _forget(self, key: str) -> None:
        self._objects.pop(key, None)
        self._index.remove(key)
