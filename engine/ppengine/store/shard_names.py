"""The names of shards that this process has read or written last, so that a chunk can be deleted by its key alone."""

from __future__ import annotations

import threading
from collections import OrderedDict

MOST = 10_000
"""Names that are kept; shards of older ones go by their age."""


class ShardNames:
    """Names by backend and chunk, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: OrderedDict[tuple[str, bytes], str] = OrderedDict()

    def note(self, backend: str, key: bytes, name: str) -> None:
        """Keep a name; it replaces that of the same chunk with other bytes."""
        with self._lock:
            self._names[backend, key] = name
            self._names.move_to_end((backend, key))
            if len(self._names) > MOST:
                self._names.popitem(last=False)

    def take(self, backend: str, keys: list[bytes]) -> list[str]:
        """Return the names of chunks, where they are known, and forget them."""
        with self._lock:
            return [name for key in keys if (name := self._names.pop((backend, key), ""))]

    def forget(self, backend: str) -> None:
        """Forget those of a backend, which is gone."""
        with self._lock:
            for one in [one for one in self._names if one[0] == backend]:
                del self._names[one]

    def clear(self) -> None:
        """Forget all, as those of another namespace."""
        with self._lock:
            self._names.clear()
