"""Jobs without slots: which chunks are there, their markers, and the care of a backend."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial

from typing_extensions import override

from ppengine.common.sizes import counted
from ppengine.protocol.store_messages import Clear, Done, Find, Found, FoundChunk, Mark, Marker, Test
from ppengine.store.backend import Backend, BackendError
from ppengine.store.bounce import Bounce
from ppengine.store.job import MARKERS, Home, Job, marker_key
from ppengine.store.lane import Lane
from ppengine.store.lane_task import Outcome, Task
from ppengine.store.shard import CorruptError, marker_bytes, pack_marker, unpack_marker

SLICE = 8
"""Least keys of a find that get a thread of their own."""
CLEAR_S = 600.0
TEST_BYTES = 4 * 2**20
PIECE = 64 * 1024
"""Random bytes made at once. glibc would keep the memory of larger ones, for each thread."""
TEST_CALLS = 7
"""Calls of a test, each of which may take the time of a call."""


class FindJob(Job):
    """Looks for markers in all backends at once. At its deadline it answers with those that it has."""

    def __init__(self, home: Home, lanes: Sequence[Lane], namespace: bytes, message: Find) -> None:
        super().__init__(home, message.job, message.deadline_ms / 1000)
        self._lanes, self._namespace, self._keys = lanes, namespace, message.keys
        self._found: dict[int, tuple[int, FoundChunk]] = {}
        """Number of the backend and chunk, by the place of the key. The first backend counts."""
        self._open = 0
        self._failure = ""

    def start(self) -> None:
        """Queue the calls: the keys are divided among the threads of a backend."""
        for number, lane in enumerate(self._lanes):
            size = max(SLICE, -(-len(self._keys) // lane.width))
            for first in range(0, len(self._keys), size):
                found: dict[int, Marker] = {}
                indices = range(first, min(first + size, len(self._keys)))
                work = partial(self._look, lane, indices, found)
                self._open += 1
                lane.submit(Task("find", work, partial(self._ended, number, found), self.wanted))
        if not self._open:
            self.end()

    @override
    def answer(self) -> Found:
        chunks: list[FoundChunk] = []
        while (found := self._found.get(len(chunks))) is not None:
            chunks.append(found[1])
        return Found(self.number, chunks, "" if chunks else self.error)

    def _look(self, lane: Lane, indices: range, found: dict[int, Marker], backend: Backend, bounce: Bounce) -> int:
        names = [marker_key(self._namespace, self._keys[index]) for index in indices]
        view = bounce.view(marker_bytes(self._home.places))
        corrupt = ""
        for index, name, there in zip(indices, names, backend.find(names), strict=True):
            if not there or not self.wanted():
                continue
            try:
                found[index] = unpack_marker(view, backend.read(name, view), self._home.places)
            except KeyError:
                continue
            except CorruptError as error:
                # Without a marker the chunk is no more, and is written again at its next use.
                backend.delete([name])
                corrupt = str(error)
        if corrupt:
            raise CorruptError(corrupt)
        return 0

    def _ended(self, number: int, found: dict[int, Marker], outcome: Outcome) -> None:
        if not self.wanted():
            return
        self._open -= 1
        self._failure = self._failure or outcome.error
        name = self._lanes[number].spec.name
        # A call over its time may still find more.
        for index, marker in list(found.items()):
            if index not in self._found or number < self._found[index][0]:
                self._found[index] = number, FoundChunk(name, marker)
        if not self._open:
            self.end(self._failure)


class CareJob(Job):
    """One task in one backend, answered by `Done`."""

    def __init__(self, home: Home, lane: Lane, number: int, limit_s: float) -> None:
        super().__init__(home, number, limit_s)
        self._lane = lane
        self._text = ""

    @override
    def answer(self) -> Done:
        return Done(*self._home.place, self.number, "" if self.error else self._text, self.error)

    def _ended(self, outcome: Outcome) -> None:
        self.end(outcome.error)


class MarkJob(CareJob):
    """Writes a marker."""

    def __init__(self, home: Home, lane: Lane, namespace: bytes, message: Mark) -> None:
        super().__init__(home, lane, message.job, message.deadline_ms / 1000)
        self._name, self._marker = marker_key(namespace, message.key), message.marker

    def start(self) -> None:
        """Queue it."""
        self._lane.submit(Task("write", self._write, self._ended, self.wanted))

    def _write(self, backend: Backend, _: Bounce) -> int:
        data = pack_marker(self._marker)
        backend.write(self._name, memoryview(data))
        return len(data)


class ClearJob(CareJob):
    """Deletes the chunks of a namespace: the markers first, so that no chunk is there in part."""

    def __init__(self, home: Home, lane: Lane, namespace: bytes, message: Clear) -> None:
        super().__init__(home, lane, message.job, CLEAR_S)
        self._names = [f"{part}/{namespace.hex()}/" for part in (MARKERS, home.part)[not home.leads :]]

    def start(self) -> None:
        """Queue it."""
        self._lane.submit(Task("care", self._clear, self._ended, self.wanted, CLEAR_S))

    def _clear(self, backend: Backend, _: Bounce) -> int:
        before = backend.usage().used_bytes
        for name in self._names:
            backend.delete([name])
        left = backend.usage()
        self._lane.usage.newest = left
        known = before >= 0 <= left.used_bytes
        self._text = f"{max(0, before - left.used_bytes) / 2**20:.1f} MiB deleted" if known else "deleted"
        return 0


class TestJob(CareJob):
    """Takes an object of some MiB through a backend."""

    __test__ = False

    def __init__(self, home: Home, lane: Lane, message: Test) -> None:
        super().__init__(home, lane, message.job, TEST_CALLS * lane.timeout_s)
        self._name = f"{home.part}/test/{secrets.token_hex(8)}"
        self._step = ""
        """The call that is under way; empty: no thread has been free yet."""

    @override
    def late_text(self) -> str:
        """Name the call that takes the time."""
        limit = f"{self.limit_s * 1000:.0f} ms"
        if not self._step:
            others = counted(self._lane.calls() - 1, "call")
            return f"no thread of {self._lane.spec.name} was free in {limit}, behind {others}"
        return f"the {self._step} of the object has not ended in {limit}"

    def start(self) -> None:
        """Queue it."""
        self._lane.submit(Task("care", self._test, self._ended, self.wanted, self.limit_s, tests=True))

    def _test(self, backend: Backend, _: Bounce) -> int:
        # Buffers of their own: that of the thread would keep this size.
        written, read = Bounce().view(TEST_BYTES), Bounce().view(TEST_BYTES)
        for at in range(0, TEST_BYTES, PIECE):
            written[at : at + PIECE] = secrets.token_bytes(PIECE)
        begin = time.monotonic()
        self._step = "write"
        backend.write(self._name, written)
        middle = time.monotonic()
        try:
            self._step = "find"
            _expect(backend, self._name, "the object is not found after its write", there=True)
            _expect(backend, f"{self._name}-none", "an object is found that was never written", there=False)
            again = time.monotonic()
            self._step = "read"
            length = backend.read(self._name, read)
            end = time.monotonic()
            if length != TEST_BYTES:
                raise CorruptError(f"the object has {TEST_BYTES} bytes, and its read returned {length}")
            if read != written:
                raise CorruptError("the object came back with other bytes")
        finally:
            self._step = "delete"
            backend.delete([self._name])
        self._step = "find"
        _expect(backend, self._name, "the object is found after its delete", there=False)
        mib = TEST_BYTES // 2**20
        self._text = f"{mib} MiB written in {(middle - begin) * 1000:.1f} ms, read in {(end - again) * 1000:.1f} ms"
        return 0


def _expect(backend: Backend, name: str, wrong: str, *, there: bool) -> None:
    """Raise BackendError with the text `wrong` unless an object is there, or is not."""
    if backend.find([name]) != [there]:
        raise BackendError(wrong)
