"""The ledger of one stage: happens-before by vector clocks, checked at every declared access.

Programs declare their operations on streams and buffers before they do them, so that a finding
comes before a crash. The order is that of the program, not of the clock on the wall: a hand-off
without a wait is found on the first run, even if the consumer happened to come late enough. Off, a
declaration costs its caller one look at `on`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable

from ppengine.protocol.reports import Finding
from ppengine.stage.ledger.actors import HOST, Access, Actor, Buffer, Mark
from ppengine.stage.ledger.call_sites import here
from ppengine.stage.ledger.order_findings import Kind, Troubles
from ppengine.stage.ledger.order_rules import OrderRules

_THREAD = "host"
"""The purpose of a thread of this process."""


class Ledger:
    """Streams, threads, buffers and hand-offs of one process.

    Every method that takes `depth` names the call site that number of frames above its caller. All
    but the properties may be called from any thread.
    """

    def __init__(self, stage: int = 0) -> None:
        self.on = False
        self.strict = False
        """Whether each operation is waited for before the next; such waits are not declared, so a missing one is found
        all the same."""
        self.troubles = Troubles(stage)
        self._rules = OrderRules(self.troubles)
        self.session = 0
        # Re-entrant: freed storage declares itself wherever it is freed, even inside of a declaration.
        self._lock = threading.RLock()
        self._actors: list[Actor] = []
        self._threads: dict[int, Actor] = {}
        self._buffers: dict[str, Buffer] = {}
        self._handoffs: dict[tuple[int, int, str], int] = {}

    # --- switching ------------------------------------------------------------------------------------------

    def switch(self, on: bool) -> None:
        """Turn the ledger on, with nothing known and no findings, or off."""
        with self._lock:
            if on == self.on:
                return
            self.session += 1
            self.troubles.clear()
            self._handoffs.clear()
            for actor in self._actors:
                actor.reset()
            for buffer in self._buffers.values():
                buffer.forget()
            self.on = on

    # --- actors and buffers ---------------------------------------------------------------------------------

    def thread(self, name: str = "", device: str | None = None) -> Actor:
        """Return the calling thread; the first call names it, `device` says which one is current in it."""
        ident = threading.get_ident()
        known = self._threads.get(ident)
        if known is None or not known.alive:
            with self._lock:
                name = name or threading.current_thread().name
                known = self._threads[ident] = self._add(name, _THREAD, device or HOST, None, 1)
        if device is not None:
            known.device = device
        return known

    def leave(self) -> None:
        """Note that the calling thread ends: its number may come again."""
        actor = self._threads.pop(threading.get_ident(), None)
        if actor is not None:
            actor.alive = False

    def stream(self, name: str, purpose: str, device: str = HOST, owner: Actor | None = None, depth: int = 0) -> Actor:
        """Return a new stream of `device`; `owner` (None: the calling thread) alone may launch on it."""
        owner = owner or self.thread()
        with self._lock:
            return self._add(name, purpose, device, owner, depth + 1)

    def peer(self, name: str) -> Actor:
        """Return a stage at the other end of an edge, which has a ledger of its own."""
        with self._lock:
            return self._add(name, "stage", "", None, 1)

    def close(self, stream: Actor, depth: int = 0) -> None:
        """Note that a stream is destroyed: its handle means nothing from here on."""
        stream.alive = False
        stream.current_at = (self.thread(), here(depth + 1))

    def buffer(self, name: str, device: str = HOST, size: int = 0) -> Buffer:
        """Return the buffer of that name, new if there is none."""
        known = self._buffers.get(name)
        if known is None:
            with self._lock:
                known = self._buffers.setdefault(name, Buffer(name, device, size))
        return known

    def make_current(self, stream: Actor | None, depth: int = 0) -> None:
        """Note that the calling thread makes `stream` its current one."""
        thread = self.thread()
        thread.current = stream
        if stream is not None:
            stream.current_at = (thread, here(depth + 1))

    def _add(self, name: str, purpose: str, device: str, owner: Actor | None, depth: int) -> Actor:
        actor = Actor(len(self._actors), name, purpose, device, owner, here(depth + 1))
        self._actors.append(actor)
        return actor

    # --- operations of streams ------------------------------------------------------------------------------

    def launch(
        self, stream: Actor, what: str, reads: Iterable[Buffer] = (), writes: Iterable[Buffer] = (), depth: int = 0
    ) -> Mark:
        """Declare an operation that the calling thread puts on `stream`; return the point behind it."""
        thread, site = self.thread(), here(depth + 1)
        with self._lock:
            on_one_device = self._rules.check_launch(thread, stream, Access(thread, thread.tick, what, site))
            stream.join(thread, thread.tick, thread.clock)
            thread.tick += 1
            stream.tick += 1
            stream.open.append((stream.tick, site, what, time.monotonic_ns()))
            access = Access(stream, stream.tick, what, site)
            for buffers, touch in ((reads, self._rules.read), (writes, self._rules.write)):
                for buffer in buffers:
                    if on_one_device:
                        self._rules.check_device(stream, buffer, access)
                    touch(buffer, access)
            return Mark(self.session, stream, stream.tick, dict(stream.clock), what)

    def record(self, stream: Actor, event: str) -> Mark:
        """Declare that `event` is recorded on `stream`: it is done when all earlier launches there are."""
        thread = self.thread()
        with self._lock:
            stream.join(thread, thread.tick, thread.clock)
            thread.tick += 1
            stream.tick += 1
            return Mark(self.session, stream, stream.tick, dict(stream.clock), event)

    def wait(self, stream: Actor, mark: Mark | None) -> None:
        """Declare that `stream` waits for `mark` before all later launches."""
        if mark is not None and mark.session == self.session:
            with self._lock:
                stream.join(mark.actor, mark.tick, mark.clock)
                stream.tick += 1
                self._note(mark.actor, stream, mark.via)

    def sync(self, mark: Mark | None) -> None:
        """Declare that the calling thread has waited for `mark`."""
        if mark is None or mark.session != self.session:
            return
        thread = self.thread()
        with self._lock:
            thread.join(mark.actor, mark.tick, mark.clock)
            self._reached(mark)
            self._note(mark.actor, thread, mark.via)

    def passed(self, producer: Actor, consumer: Actor, via: str) -> None:
        """Note a hand-off with another stage; the message that has arrived is the order."""
        with self._lock:
            self._note(producer, consumer, via)

    def peer_does(
        self,
        peer: Actor,
        what: str,
        after: Mark | None = None,
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
        depth: int = 0,
    ) -> Mark:
        """Declare a stage's operation at its end of an edge, once it has seen `after`; return the point behind it."""
        site = here(depth + 1)
        with self._lock:
            if after is not None and after.session == self.session:
                peer.join(after.actor, after.tick, after.clock)
                self._note(after.actor, peer, after.via)
            peer.tick += 1
            access = Access(peer, peer.tick, what, site)
            for buffer in reads:
                self._rules.read(buffer, access)
            for buffer in writes:
                self._rules.write(buffer, access)
            return Mark(self.session, peer, peer.tick, dict(peer.clock), what)

    def completed(self, mark: Mark) -> None:
        """Declare that the operation before `mark` is done; this orders nothing."""
        if mark.session == self.session:
            with self._lock:
                self._reached(mark)

    def _reached(self, mark: Mark) -> None:
        """Note that all before `mark` is done, and so is all work that it has waited for."""
        mark.actor.reached(mark.tick)
        for number, tick in mark.clock.items():
            self._actors[number].reached(tick)

    # --- operations of threads ------------------------------------------------------------------------------

    def release(self, via: str) -> Mark:
        """Declare that the calling thread hands over to the thread that acquires the result, by way of `via`."""
        thread = self.thread()
        with self._lock:
            mark = Mark(self.session, thread, thread.tick, dict(thread.clock), via)
            thread.tick += 1
            return mark

    def acquire(self, mark: Mark | None) -> None:
        """Declare that the calling thread has taken over at `mark`."""
        if mark is not None and mark.session == self.session:
            thread = self.thread()
            with self._lock:
                thread.join(mark.actor, mark.tick, mark.clock)
                self._note(mark.actor, thread, mark.via)

    def read(self, buffer: Buffer, what: str, depth: int = 0) -> None:
        """Declare that the calling thread itself reads `buffer`."""
        thread, site = self.thread(), here(depth + 1)
        with self._lock:
            self._rules.read(buffer, Access(thread, thread.tick, what, site))

    def write(self, buffer: Buffer, what: str, depth: int = 0) -> None:
        """Declare that the calling thread itself writes `buffer`."""
        thread, site = self.thread(), here(depth + 1)
        with self._lock:
            self._rules.write(buffer, Access(thread, thread.tick, what, site))

    def free(self, buffer: Buffer, what: str, by: Actor | None = None, depth: int = 0) -> None:
        """Declare that the memory of `buffer` goes back to its pool in the order of `by` (None: the thread).

        A pool that knows the order of a stream takes memory back in that order: an access on
        another stream that `by` has not waited for may still be under way when the next owner
        writes.
        """
        site = here(depth + 1)
        with self._lock:
            actor = by or self.thread()
            self._free(buffer, actor, Access(actor, actor.tick, what, site))

    def dropped(self, buffer: Buffer, what: str, depth: int = 0) -> None:
        """Declare that the last reference to the memory of `buffer` has gone, and with it the memory.

        Any thread may notice that, as the garbage collector does. All threads that have used the
        memory have let go of it before, so that the work they have waited for is over. Operations
        of a stream hold no reference.
        """
        site = here(depth + 1)
        with self._lock:
            actor = self.thread()
            users = {access.actor for access in (buffer.writer, *buffer.readers.values()) if access is not None}
            for user in users | {buffer.issuer or actor}:
                if user.purpose == _THREAD and user is not actor:
                    actor.join(user, user.tick, user.clock)
                    user.tick += 1
            self._free(buffer, actor, Access(actor, actor.tick, what, site))

    def _free(self, buffer: Buffer, actor: Actor, access: Access) -> None:
        self._rules.check_unfinished(Kind.FREED, buffer, access)
        buffer.freed = access, Mark(self.session, actor, actor.tick, dict(actor.clock), "pool")
        if actor.owner is None:
            actor.tick += 1

    def issue(self, buffer: Buffer, what: str, by: Actor | None = None, depth: int = 0) -> None:
        """Declare that the memory of `buffer` is handed out again, in the order of `by` (None: the thread)."""
        site = here(depth + 1)
        with self._lock:
            actor = by or self.thread()
            freed, buffer.freed = buffer.freed, None
            if freed is not None and actor.owner is None and freed[0].actor.owner is None:
                # An allocator of host memory takes it from one thread and gives it to another under its own lock.
                actor.join(freed[1].actor, freed[1].tick, freed[1].clock)
            self._rules.check_unfinished(Kind.REISSUED, buffer, Access(actor, actor.tick, what, site))
            buffer.generation += 1
            buffer.writer, buffer.issuer = None, actor
            buffer.readers.clear()

    def check_stuck(self, limit_s: float) -> None:
        """Find streams for computing whose oldest operation is not done `limit_s` after it was launched."""
        with self._lock:
            self._rules.check_stuck(self._actors, limit_s)

    # --- known facts ----------------------------------------------------------------------------------------

    def _note(self, producer: Actor, consumer: Actor, via: str) -> None:
        if producer is not consumer:
            key = producer.id, consumer.id, sys.intern(via.partition(" of m")[0])
            self._handoffs[key] = self._handoffs.get(key, 0) + 1

    def findings(self) -> list[Finding]:
        """Return the findings since the ledger was switched on, oldest first."""
        return self.troubles.findings()

    @property
    def actors(self) -> list[Actor]:
        """All streams and threads, in order of appearance."""
        return list(self._actors)

    @property
    def buffers(self) -> list[Buffer]:
        """All buffers that were declared."""
        return list(self._buffers.values())

    @property
    def handoffs(self) -> list[tuple[Actor, Actor, str, int]]:
        """Producer, consumer, by what, and how often since the ledger was switched on."""
        with self._lock:
            return [
                (self._actors[producer], self._actors[consumer], via, count)
                for (producer, consumer, via), count in self._handoffs.items()
            ]
