"""The rules that every backend keeps. `docs/backends.md` refers to them."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import pytest
from ppengine.store.backend import Backend, BackendOptions, Layout

SIZE = 64 * 1024
LAYOUT = Layout(("0.0", "marker"))


def page_view(data: bytes) -> memoryview:
    """Return a page-aligned buffer of `data`, as the store has them."""
    buffer = mmap.mmap(-1, max(1, len(data)))
    buffer[: len(data)] = data
    return memoryview(buffer)[: len(data)]


def read(backend: Backend, key: str, size: int = SIZE) -> bytes:
    """Return an object of at most `size` bytes."""
    view = page_view(bytes(size))
    return bytes(view[: backend.read(key, view)])


class Contract:
    """Opens a kind of backend; `again` opens another one on the same place, and `url` names that."""

    def __init__(self, make: Callable[[], Backend], url: str, *, persistent: bool = True) -> None:
        self.make, self.url, self.persistent = make, url, persistent

    def open(self, quota: int = 2**30, layout: Layout = LAYOUT) -> Backend:
        backend = self.make()
        backend.open(BackendOptions("b", self.url, quota, 5.0), layout)
        return backend

    def check_objects(self) -> None:
        """Objects are found, read, replaced and deleted."""
        backend = self.open()
        keys = [f"0.0/ab/{number:032x}" for number in range(3)]
        assert backend.find(keys) == [False] * 3 and backend.usage().used_bytes == 0
        with pytest.raises(KeyError):
            backend.read(keys[0], memoryview(bytearray(SIZE)))
        first, second = os.urandom(SIZE), os.urandom(SIZE // 2)
        backend.write(keys[0], page_view(first))
        backend.write(keys[1], page_view(second))
        backend.write("marker/ab/" + keys[0][-32:], memoryview(b"a marker of 27 bytes or so!"))
        assert backend.find(keys) == [True, True, False]
        assert read(backend, keys[0]) == first and read(backend, keys[1]) == second
        assert read(backend, "marker/ab/" + keys[0][-32:], 4096) == b"a marker of 27 bytes or so!"
        assert backend.usage().used_bytes == SIZE + SIZE // 2 + 27
        backend.write(keys[0], page_view(second))
        assert read(backend, keys[0]) == second
        short = page_view(bytes(4096))
        assert backend.read(keys[0], short) == len(second), "the whole length of an object that is longer"
        backend.delete([keys[0], keys[2]])
        assert backend.find(keys) == [False, True, False]
        assert backend.usage().used_bytes == SIZE // 2 + 27
        backend.close()

    def check_clear(self) -> None:
        """A key that ends with a slash means all below it, and nothing beside it."""
        backend = self.open()
        keys = ["0.0/ab/01", "0.0/ab/02", "0.0/abc/01", "marker/ab/01"]
        for key in keys:
            backend.write(key, page_view(b"x" * 100))
        backend.delete(["0.0/ab/"])
        assert backend.find(keys) == [False, False, True, True]
        backend.delete(["marker/ab/", "0.0/nothing/"])
        assert backend.find(keys) == [False, False, True, False]
        assert backend.usage().used_bytes == 100
        backend.close()

    def check_quota(self) -> None:
        """The least recently used objects go first, and an object beyond the quota is refused."""
        backend = self.open(quota=3 * SIZE)
        keys = [f"0.0/ab/{number}" for number in range(5)]
        for key in keys[:3]:
            backend.write(key, page_view(key.encode() * (SIZE // 8)))
        read(backend, keys[0])
        backend.write(keys[3], page_view(bytes(SIZE)))
        assert backend.find(keys) == [True, False, True, True, False]
        backend.write(keys[3], page_view(bytes(SIZE)))
        assert backend.find(keys) == [True, False, True, True, False], "a replaced object needs no second room"
        assert backend.usage().used_bytes <= 3 * SIZE and backend.usage().evicted == 1
        with pytest.raises(Exception, match="quota"):
            backend.write(keys[4], page_view(bytes(4 * SIZE)))
        assert backend.find(keys) == [True, False, True, True, False]
        backend.close()

    def check_reopen(self) -> None:
        """Objects and the order of their use outlive the process, where the backend says so."""
        backend = self.open()
        keys = [f"0.0/ab/{number}" for number in range(4)]
        for key in keys[:3]:
            backend.write(key, page_view(bytes(SIZE)))
        backend.close()
        again = self.open(quota=3 * SIZE)
        there = self.persistent
        assert again.find(keys[:3]) == [there] * 3
        assert again.usage().used_bytes == there * 3 * SIZE
        again.write(keys[3], page_view(bytes(SIZE)))
        assert again.find(keys) == [False, there, there, True]
        again.close()

    def check_shares(self) -> None:
        """Quota and usage are about the parts of one store; those of another place are left alone."""
        other = self.open(layout=Layout(("1.0",)))
        other.write("1.0/ab/1", page_view(bytes(SIZE)))
        backend = self.open(quota=SIZE)
        assert backend.usage().used_bytes == 0
        for number in range(3):
            backend.write(f"0.0/ab/{number}", page_view(bytes(SIZE)))
        assert other.find(["1.0/ab/1"]) == [True] and other.usage().used_bytes == SIZE
        backend.close()
        other.close()
