"""GB/s and CPU time of backends: `python tests/engine/bench_store_backends.py KIND [URL] [MIB_IN_ALL]`.

Shards go through the store's own path: from slots by a buffer and a checksum to the backend, and back. Threads are
those of the backend. CPU time is that of this process; a server of `valkey` or `s3` takes its own.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from ppengine.common.call_page import CallPage
from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import BackendSpec, Fetch, Fetched, Put, Stored, UseBackends, UseNamespace
from ppengine.store.backend_kinds import make_backend
from ppengine.store.job import Home
from ppengine.store.lane import Lane
from ppengine.store.store import Store
from store_world import Pool

MIB = 2**20
LIMIT_MS = 600_000


class Bench:
    """A store with real threads, whose loop is the caller."""

    def __init__(self, kind: str, url: str) -> None:
        self._ready = threading.Condition()
        self._posted: deque[Callable[[], None]] = deque()
        self.answers: list[object] = []
        self.store = Store(Place(0, 0), 1, self.answers.append, self._post, time.monotonic, self._lane)
        self.store.take(UseNamespace(os.urandom(16)))
        self.store.take(UseBackends([BackendSpec("b", kind, url, 2**40, LIMIT_MS)]))
        self._run(lambda: self.store.figures().backends[0].state == "open")

    def _post(self, function: Callable[[], None]) -> None:
        with self._ready:
            self._posted.append(function)
            self._ready.notify()

    def _lane(self, spec: BackendSpec, home: Home) -> Lane:
        lane = Lane(spec, home.layout, lambda: make_backend(spec.kind), self._post, time.monotonic, CallPage())
        lane.start()
        return lane

    def _run(self, done: Callable[[], bool]) -> None:
        while not done():
            with self._ready:
                self._ready.wait_for(lambda: self._posted, 0.01)
                todo = list(self._posted)
                self._posted.clear()
            for function in todo:
                function()

    def measure(self, slot_bytes: int, count: int) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return GB/s and CPU microseconds a MiB, of writing and of reading `count` shards of one slot each."""
        slots = 8
        pool = Pool(slots, slot_bytes)
        for slot in range(slots):
            pool.write(slot, os.urandom(slot_bytes))
        self.store.take(pool.message())
        keys = [b"%016d" % number for number in range(count)]
        self.answers.clear()

        def put() -> None:
            for number, key in enumerate(keys):
                self.store.take(Put(number, 1, "b", key, [number % slots], LIMIT_MS))

        written = self._timed(put, count)
        stored = {each.job: each for each in self.answers if isinstance(each, Stored)}
        assert all(not each.error for each in stored.values()), next(each.error for each in stored.values())
        self.answers.clear()
        sums = [stored[number].sum for number in range(count)]
        fetch = Fetch(0, 1, "b", keys, [[number % slots] for number in range(count)], sums, LIMIT_MS)
        read = self._timed(lambda: self.store.take(fetch), 1)
        (fetched,) = self.answers
        assert isinstance(fetched, Fetched) and fetched.good == count, fetched
        pool.close()
        size = slot_bytes * count
        return _rates(written, size), _rates(read, size)

    def _timed(self, begin: Callable[[], None], answers: int) -> tuple[float, float]:
        start, cpu = time.monotonic(), time.process_time()
        begin()
        self._run(lambda: len(self.answers) == answers)
        return time.monotonic() - start, time.process_time() - cpu


def _rates(spent: tuple[float, float], size: int) -> tuple[float, float]:
    return size / spent[0] / 1e9, spent[1] * 1e6 / (size / MIB)


def main() -> None:
    """Print one row for each size of shards."""
    kind, url = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    whole = int(sys.argv[3]) if len(sys.argv) > 3 else 512
    print("| backend | shard | write GB/s | read GB/s | write µs/MiB | read µs/MiB |\n|---|---|---|---|---|---|")
    for mib in (1, 8):
        # The header is part of the shard: it is a whole number of MiB then.
        write, read = Bench(kind, url).measure(mib * MIB - 4096, whole // mib)
        print(f"| {kind} | {mib} MiB | {write[0]:.2f} | {read[0]:.2f} | {write[1]:.0f} | {read[1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
