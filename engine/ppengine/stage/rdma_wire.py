"""A wire whose bytes go by RDMA: the sender writes them into a ring in the receiver's memory.

The connection stays. On it the sender says how many bytes it has written so far, and the receiver how
many it has taken out. So a wait is a wait for a socket, without a thread that spins, and the end of a
process shows as before. A message that is larger than the ring goes through it in pieces.
"""

from __future__ import annotations

import struct
import time

from typing_extensions import override

from ppengine.stage.rdma_agent import NoRdmaError, RdmaAgent
from ppengine.stage.wire import PeerLostError, SupersededError, Wire

RING_BYTES = 16 * 2**20
"""Size of the ring, and of the memory from which the sender writes."""
WRITE_S = 10.0
"""Seconds after which a write that an adapter has not carried out loses the peer."""
_COUNT = struct.Struct("<Q")
_SPINS = 2000
"""Looks at a write before the thread sleeps between two of them: most take microseconds."""


class RdmaWire(Wire):
    """One end of such a wire. It takes over the connection of `wire`, and owns `agent`."""

    carrier = "RDMA"

    def __init__(self, wire: Wire, agent: RdmaAgent) -> None:
        super().__init__(wire._socket, wire.peer, wire._left, wire.rank, wire.key)
        self._counts, self._agent = wire, agent
        self._memory = agent.view
        self._size = len(self._memory)
        self._said = bytearray()
        self._written = self._taken = 0
        """Bytes so far, of the whole stream."""

    def _newest_count(self) -> int | None:
        """Return the newest number that the peer has sent; None: it has sent none. Never waits.

        The end of the connection is raised by a call after those that return the numbers before it.
        """
        try:
            said = self._socket.recv(4096)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lost(error) from None
        if not said:
            raise self._lost()
        self._said += said
        whole = len(self._said) // _COUNT.size * _COUNT.size
        if not whole:
            return None
        (newest,) = _COUNT.unpack_from(self._said, whole - _COUNT.size)
        del self._said[:whole]
        return int(newest)

    def _say(self, count: int) -> None:
        self._counts.send([memoryview(_COUNT.pack(count))])

    def _broke(self, what: str) -> PeerLostError:
        return PeerLostError(f"lost {self._name}: RDMA: {what}", self.peer, self.rank)

    @override
    def close(self) -> None:
        self._agent.close()
        super().close()


class RdmaSendWire(RdmaWire):
    """The sender's end."""

    @override
    def push(self, parts: list[memoryview]) -> list[memoryview]:
        """Write as much as the ring has room for, and return the rest."""
        self._credit()
        while parts and (room := self._size - (self._written - self._taken)):
            at = end = self._written % self._size
            most = min(self._size, at + room)
            while parts and end < most:
                part = parts[0][: most - end]
                self._memory[end : end + len(part)] = part
                end += len(part)
                rest = parts[0][len(part) :]
                parts = [rest, *parts[1:]] if rest else parts[1:]
            self._write(at, end - at)
            self._written += end - at
            self._say(self._written)
        return parts

    @override
    def send(self, parts: list[memoryview]) -> None:
        """Send all, waiting for room."""
        while parts := self.push(parts):
            self._wait(self._readable)

    @override
    def check_sendable(self) -> None:
        """Raise PeerLostError if the peer is known to be gone."""
        self.check_open()

    def _credit(self) -> None:
        taken = self._newest_count()
        if taken is None:
            return
        if not self._taken <= taken <= self._written:
            raise self._broke(f"it took {taken} bytes, {self._taken} to {self._written} are possible")
        self._taken = taken

    def _write(self, at: int, count: int) -> None:
        try:
            write = self._agent.write(at, count)
            try:
                deadline, spins = time.monotonic() + WRITE_S, 0
                while not write.done():
                    if (spins := spins + 1) < _SPINS:
                        continue
                    if self.left:
                        raise SupersededError(f"{self._name} was written to")
                    self.check_open()
                    if time.monotonic() > deadline:
                        raise self._broke(f"{count} bytes were not written in {WRITE_S:g} s")
                    time.sleep(1e-4)
            finally:
                write.release()
        except NoRdmaError as error:
            self.check_open()
            raise self._broke(str(error)) from None


class RdmaReceiveWire(RdmaWire):
    """The receiver's end."""

    def __init__(self, wire: Wire, agent: RdmaAgent) -> None:
        super().__init__(wire, agent)
        self._thanked = 0
        """Bytes taken out, as far as the sender knows."""

    @property
    @override
    def readable(self) -> bool:
        """Whether something has come, be it the end."""
        return self._written > self._taken or super().readable

    @override
    def read(self, parts: list[memoryview]) -> int:
        """Wait until bytes have come, and put them into `parts`, one behind the other; return their number."""
        while self._written == self._taken:
            self._wait(self._readable)
            self._arrived()
        count = 0
        for part in parts:
            while part and self._written > self._taken:
                at = self._taken % self._size
                piece = min(len(part), self._written - self._taken, self._size - at)
                part[:piece] = self._memory[at : at + piece]
                part = part[piece:]
                self._taken += piece
                count += piece
        # Before the ring is full, so that the sender seldom waits; not each time, it seldom needs to know.
        if self._taken - self._thanked >= self._size // 4:
            self._say(self._taken)
            self._thanked = self._taken
        return count

    def _arrived(self) -> None:
        written = self._newest_count()
        if written is None:
            return
        if not self._written <= written <= self._taken + self._size:
            raise self._broke(f"it wrote {written} bytes, {self._written} to {self._taken + self._size} are possible")
        self._written = written
