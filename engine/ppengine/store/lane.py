"""One backend at work: its threads, its queue, its figures, and the time limit of each call."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from ppengine.common.call_page import CallPage
from ppengine.protocol.store_messages import BackendFigures, BackendSpec
from ppengine.store.backend import Backend, Layout
from ppengine.store.backend_health import BackendHealth
from ppengine.store.bounce import Bounce
from ppengine.store.checked_backend import CheckedBackend
from ppengine.store.lane_task import ORDER, SIDES, Kind, Outcome, Task, UnwantedError
from ppengine.store.opener import Opener, error_text
from ppengine.store.shard import CorruptError
from ppengine.store.usage_watch import UsageWatch

log = logging.getLogger("ppengine.store")

QUEUE_MOST = 1024
"""Tasks that may wait; later ones are refused."""
AGAIN_S, AGAIN_MOST_S = 1.0, 60.0
"""Seconds until `open` is tried again, which double."""


class Lane:
    """A backend and its threads. All methods but `work_once` and `serve` belong to the loop.

    `post` hands a function over to the loop, from any thread. `make` makes a backend that is not open yet.
    """

    def __init__(
        self, spec: BackendSpec, layout: Layout, make: Callable[[], Backend],
        post: Callable[[Callable[[], None]], None], clock: Callable[[], float],
        calls: CallPage,
    ) -> None:  # fmt: skip
        self.spec = spec
        self._post, self._clock = post, clock
        self._opener = Opener(spec, layout, make, clock, calls)
        self._ready = threading.Condition()
        self._queues: dict[Kind, deque[Task]] = {kind: deque() for kind in ORDER}
        self._active: set[Task] = set()
        self._writing = 0
        self._threads = 0
        self._most_writes = 1
        self._backend: CheckedBackend | None = None
        self._closing = False
        self.ended = False
        """The backend is closed, and no thread is left."""
        self._health = BackendHealth(spec.name)
        self._asked: list[Callable[[], None]] = []
        """Called after the next try to open, which is made at once for them."""
        self.usage = UsageWatch(clock)

    # --- the loop's side ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to open the backend, on a thread of its own."""
        self._threads = 1
        threading.Thread(target=self.serve, name=self.spec.name, args=(True,), daemon=True).start()

    @property
    def width(self) -> int:
        """Calls that may be under way at once."""
        return 1 if self._backend is None else self._backend.width

    @property
    def timeout_s(self) -> float:
        """Seconds for one call."""
        return self.spec.timeout_ms / 1000

    def refusal(self, kind: Kind) -> str:
        """Return why no job of a kind is taken now; empty: it is. An open breaker lets one try through."""
        name = self.spec.name
        if self.spec.paused:
            return f"{name} is paused"
        if self.spec.draining and kind == "write":
            return f"{name} is draining"
        if text := self.not_open():
            return text
        if kind == "write" and self._writes_stuck:
            return f"{name} hangs: writes over their time hold its threads"
        return self._health.refusal(SIDES[kind], self._clock()) if kind in SIDES else ""

    def not_open(self) -> str:
        """Return why no call can begin; empty: one can."""
        name = self.spec.name
        if self._backend is None or self._closing:
            why = self._opener.error
            pending = "is paused, and not open" if self.spec.paused else "is opening"
            return f"{name} cannot be opened: {why}" if why else f"{name} {pending}"
        return f"{name} hangs: calls over their time hold all its threads" if self._stuck else ""

    def use(self, spec: BackendSpec) -> None:
        """Take other settings of the same place."""
        with self._ready:
            self.spec = spec
            self._ready.notify_all()

    @property
    def waits_to_open(self) -> bool:
        """Whether the newest try to open it has failed, or a pause keeps it from one."""
        return self._backend is None and not self._closing and bool(self._opener.failure or self.spec.paused)

    def open_soon(self, then: Callable[[], None]) -> None:
        """Try to open it at once, without the rest of the pause. `then` follows that try, or the end of the lane."""
        with self._ready:
            if self._backend is None and not self._closing:
                self._asked.append(then)
                self._ready.notify_all()
                return
        self._post(then)

    @property
    def _stuck(self) -> bool:
        """Whether each thread is in a call over its time. With fewer threads than `FAILURES` no breaker would open."""
        return self._backend is not None and self._hung() >= self.width

    @property
    def _writes_stuck(self) -> bool:
        """Whether each thread that may write is in a write over its time."""
        return self._backend is not None and self._hung("write") >= self._most_writes

    def _hung(self, kind: Kind | None = None) -> int:
        """Return the number of calls under way, of a kind, that are over their time."""
        with self._ready:
            return sum(task.over for task in self._active if kind in (None, task.kind))

    def submit(self, task: Task) -> None:
        """Queue a task. One that has no place ends at once."""
        with self._ready:
            full = sum(map(len, self._queues.values())) >= QUEUE_MOST
            if not full and not self._closing:
                self._queues[task.kind].append(task)
                self._ready.notify()
                return
        why = f"the queue of {self.spec.name} is full" if full else f"{self.spec.name} is being removed"
        self._post(lambda: self._end(task, Outcome(error=why, skipped=True)))

    def tick(self) -> None:
        """End the tasks whose calls are over their time, and ask for the usage."""
        now = self._clock()
        with self._ready:
            late = [task for task in self._active if not task.over and now - task.begun > self._limit(task)]
        for task in late:
            text = f"{self.spec.name} did not answer in {self._limit(task) * 1000:.0f} ms"
            self._end(task, Outcome(error=text, failed=True))
        idle = self._backend is None or self._closing or self.spec.paused
        if not idle and (question := self.usage.question()) is not None:
            self.submit(question)

    def close(self) -> None:
        """Take no more tasks. Calls under way end, then the backend is closed."""
        with self._ready:
            self._closing = True
            left = [task for queue in self._queues.values() for task in queue]
            for queue in self._queues.values():
                queue.clear()
            asked, self._asked = self._asked, []
            self._ready.notify_all()
            idle = self._threads == 0
        for then in asked:
            self._post(then)
        for task in left:
            self._end(task, Outcome(error=f"{self.spec.name} is being removed", skipped=True))
        if idle:
            self._close_backend()

    def figures(self) -> BackendFigures:
        """Return the figures of now."""
        now, spec, health = self._clock(), self.spec, self._health
        error = health.report_error() or self.usage.error
        state = "paused" if spec.paused else "draining" if spec.draining else "open"
        if self._backend is None:
            error = self._opener.error
            state = "broken" if error else "opening"
        read, write = health.reads.quantiles(now), health.writes.quantiles(now)
        breakers, stuck = health.breakers, self._stuck
        return BackendFigures(
            name=spec.name, state=state, error=error,
            breaker="open" if stuck else breakers["read"].state,
            write_breaker="open" if stuck or self._writes_stuck else breakers["write"].state,
            used_bytes=self.usage.newest.used_bytes, queue=self._queue(), evicted=self.usage.newest.evicted,
            read_p50_ms=read[0], read_p99_ms=read[1], write_p50_ms=write[0], write_p99_ms=write[1],
            threads=self.width, **health.counts,
        )  # fmt: skip

    def _queue(self) -> int:
        """Return the calls for operators: nothing waits for deletes that a pause or a closed backend holds."""
        held = self._backend is None or self.spec.paused
        return self.calls() - (len(self._queues["delete"]) if held else 0)

    def calls(self) -> int:
        """Return the number of calls that wait or are under way; those that ask for the usage are left out."""
        with self._ready:
            return sum(task.counts for tasks in (*self._queues.values(), self._active) for task in tasks)

    def _limit(self, task: Task) -> float:
        return self.timeout_s if task.limit_s is None else task.limit_s

    def _end(self, task: Task, outcome: Outcome) -> None:
        """Count the end of a task and report it, once: a call that was given up may return later."""
        if task.over:
            return
        task.over = True
        now = self._clock()
        if task.counts and not outcome.skipped:
            self._health.note(task.kind, outcome, now, (now - task.begun) * 1000, tests=task.tests)
        task.end(outcome)

    # --- the threads' side ----------------------------------------------------------------------------------

    def serve(self, opens: bool = False) -> None:
        """Work until the lane is closed; the first thread opens the backend and starts the others."""
        bounce = Bounce()
        if opens:
            self._open_until_closed()
        while self.work_once(bounce):
            pass
        with self._ready:
            self._threads -= 1
            last = self._threads == 0
        if last:
            self._close_backend()

    def open_once(self) -> None:
        """Open the backend. Its failure is kept for the figures."""
        with self._ready:
            asked, self._asked = self._asked, []
        backend = self._opener.open()
        with self._ready:
            if backend is not None:
                self._backend, self._most_writes = backend, max(1, backend.width - 1)
            if self._backend is not None:  # those who asked meanwhile wait for no other try
                asked, self._asked = asked + self._asked, []
        for then in asked:
            self._post(then)

    def _open_until_closed(self) -> None:
        wait_s = AGAIN_S
        while not self._closing:
            with self._ready:
                # A paused backend may be one whose `open` ends the process.
                self._ready.wait_for(lambda: self._closing or bool(self._asked) or not self.spec.paused)
            if self._closing:
                return
            self.open_once()
            if self._backend is not None:
                with self._ready:
                    self._threads = self._backend.width
                for _ in range(self._backend.width - 1):
                    threading.Thread(target=self.serve, name=self.spec.name, daemon=True).start()
                return
            with self._ready:
                self._ready.wait_for(lambda: self._closing or bool(self._asked), wait_s)
            wait_s = min(2 * wait_s, AGAIN_MOST_S)

    def work_once(self, bounce: Bounce, wait: bool = True) -> bool:
        """Do the next task, waiting for it if `wait`. Returns False if the lane is closed, or nothing was there."""
        with self._ready:
            while (task := self._next()) is None:
                if self._closing or not wait:
                    return False
                self._ready.wait()
            task.begun = self._clock()
            self._active.add(task)
            self._writing += task.kind == "write"
        outcome = self._do(task, bounce)
        with self._ready:
            self._active.discard(task)
            self._writing -= task.kind == "write"
            self._ready.notify()
        self._post(lambda: self._end(task, outcome))
        return True

    def _next(self) -> Task | None:
        for kind in ORDER:
            if kind == "delete" and self.spec.paused:
                continue
            # One thread at least is left for reads.
            if self._queues[kind] and (kind != "write" or self._writing < self._most_writes):
                return self._queues[kind].popleft()
        return None

    def _do(self, task: Task, bounce: Bounce) -> Outcome:
        backend = self._backend
        try:
            if backend is None or not task.wanted():
                raise UnwantedError
            return Outcome(moved=task.work(backend, bounce))
        except UnwantedError:
            return Outcome(error="it is not wanted any more", skipped=True)
        except KeyError as error:
            return Outcome(error=f"{error} is not there", missing=True)
        except CorruptError as error:
            return Outcome(error=str(error), corrupt=True)
        except Exception as error:  # noqa: BLE001 - client libraries raise what they like
            return Outcome(error=error_text(error), failed=True)

    def _close_backend(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            try:
                backend.close()
            except Exception as error:  # noqa: BLE001 - client libraries raise what they like
                log.warning("%s does not close: %s", self.spec.name, error_text(error))
        self.ended = True
