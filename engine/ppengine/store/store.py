"""A store: its pool, its backends and its open jobs. It has no socket, so that tests can drive it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import msgspec

from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import (
    BackendSpec,
    Cancel,
    Clear,
    Delete,
    Done,
    Fetch,
    Fetched,
    Find,
    Found,
    Mark,
    OpenPool,
    Put,
    Stored,
    StoreFigures,
    Test,
    UseBackends,
    UseNamespace,
)
from ppengine.store.backend import Backend
from ppengine.store.bounce import Bounce
from ppengine.store.job import Home, Job, marker_key
from ppengine.store.lane import Lane
from ppengine.store.lane_task import Kind, Outcome, Task
from ppengine.store.lookups import ClearJob, FindJob, MarkJob, TestJob
from ppengine.store.slot_pool import SlotPool
from ppengine.store.transfers import FetchJob, PutJob

log = logging.getLogger("ppengine.store")

Question = Find | Fetch | Put | Mark | Clear | Test
LaneMaker = Callable[[BackendSpec, Home], Lane]
_J = TypeVar("_J", FetchJob, PutJob, FindJob, MarkJob, ClearJob, TestJob)


class RefusedError(Exception):
    """A job cannot begin, in one line."""


class Store:
    """Takes messages and answers through `send`. All methods belong to one thread, the loop."""

    def __init__(
        self, place: Place, places: int, send: Callable[[msgspec.Struct], None],
        post: Callable[[Callable[[], None]], None], clock: Callable[[], float], make_lane: LaneMaker,
    ) -> None:  # fmt: skip
        self._home = Home(place, places, clock, post, self._answer)
        self._send, self._clock, self._make_lane = send, clock, make_lane
        self._jobs: dict[int, Job] = {}
        self._tests: dict[int, Test] = {}
        """Tests whose backend is tried to be opened first."""
        self._lanes: dict[str, Lane] = {}
        self._retired: list[Lane] = []
        self._pool: SlotPool | None = None
        self._pool_error = "there is no pool yet"
        self._next_pool: OpenPool | None = None
        self._namespace: bytes | None = None
        self._silent = False
        self._changes = 0
        """Number of the backends' settings."""

    # --- messages -------------------------------------------------------------------------------------------

    def take(self, message: object) -> None:
        """Take a message of the core."""
        if isinstance(message, Question):
            self._begin(message)
        elif isinstance(message, Cancel):
            if message.job in self._jobs:
                self._jobs[message.job].end("it was cancelled")
            elif (test := self._tests.pop(message.job, None)) is not None:
                self._send(self._refusal(test, "it was cancelled"))
        elif isinstance(message, Delete):
            self._delete(message)
        elif isinstance(message, OpenPool):
            self._next_pool = message
            self._end_pool_jobs("the pool is being replaced")
            self._swap_pool()
        elif isinstance(message, UseNamespace):
            if message.namespace != self._namespace:
                self._home.names.clear()
            self._namespace = message.namespace
        elif isinstance(message, UseBackends):
            self._use(message.backends)
            self._changes = message.changes

    def tick(self) -> None:
        """End jobs and calls that are over their time."""
        now = self._clock()
        for job in [job for job in self._jobs.values() if now >= job.due]:
            job.end(job.late_text())
        for lane in [*self._lanes.values(), *self._retired]:
            lane.tick()
        self._retired = [lane for lane in self._retired if not lane.ended]

    def figures(self) -> StoreFigures:
        """Return the figures of now."""
        return StoreFigures(*self._home.place, [lane.figures() for lane in self._lanes.values()], self._changes)

    @property
    def busy(self) -> bool:
        """Whether a job is open."""
        return bool(self._jobs)

    # --- end ------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """End all jobs without an answer, for a core that is gone. `busy` until nothing copies any more."""
        self._silent = True
        self._changes = 0
        self._namespace = self._next_pool = None
        self._tests.clear()
        for job in list(self._jobs.values()):
            job.end("the core is gone")
        self._drop_pool()

    def resume(self) -> None:
        """Serve another core, after `reset`; nothing of the older one is left but open backends."""
        assert not self._jobs, "all jobs have ended"
        self._drop_pool()
        self._silent = False

    def close(self) -> None:
        """Close the backends."""
        self.reset()
        self._use([])

    @property
    def closed(self) -> bool:
        """Whether all backends are closed, after `close`."""
        return all(lane.ended for lane in self._retired)

    # --- jobs -----------------------------------------------------------------------------------------------

    def _begin(self, message: Question) -> None:
        if message.job in self._jobs or message.job in self._tests:
            log.error("job %d is open already; its second message is dropped", message.job)
            return
        try:
            if isinstance(message, Find):
                self._start(self._find(message))
            elif isinstance(message, Fetch):
                lane = self._lane(message.backend, "read")
                self._start(FetchJob(self._home, lane, self._pool_of(message), self._named(), message))
            elif isinstance(message, Put):
                lane = self._lane(message.backend, "write")
                self._start(PutJob(self._home, lane, self._pool_of(message), self._named(), message))
            elif isinstance(message, Mark):
                self._must_lead()
                self._start(MarkJob(self._home, self._lane(message.backend, "write"), self._named(), message))
            elif isinstance(message, Clear):
                self._start(ClearJob(self._home, self._lane(message.backend, None), self._named(), message))
            else:
                self._test(message)
        except RefusedError as error:
            self._send(self._refusal(message, str(error)))

    def _test(self, message: Test) -> None:
        """Test a backend; one that is not open is tried first, for its place may be mended."""
        lane = self._lanes.get(message.backend)
        if lane is None or not lane.waits_to_open:
            self._start(TestJob(self._home, self._lane(message.backend, None), message))
            return

        def tried() -> None:
            if self._tests.get(message.job) is not message:
                return  # It was cancelled, or its core is gone.
            del self._tests[message.job]
            try:
                self._start(TestJob(self._home, self._lane(message.backend, None), message))
            except RefusedError as error:
                self._send(self._refusal(message, str(error)))

        self._tests[message.job] = message
        lane.open_soon(tried)

    def _start(self, job: _J) -> None:
        self._jobs[job.number] = job
        job.start()

    def _find(self, message: Find) -> FindJob:
        self._must_lead()
        namespace = self._named()
        refusals = {lane: lane.refusal("find") for lane in self._lanes.values()}
        lanes = [lane for lane, why in refusals.items() if not why]
        if not lanes:
            raise RefusedError("; ".join(refusals.values()) or "there is no backend")
        return FindJob(self._home, lanes, namespace, message)

    def _lane(self, name: str, kind: Kind | None) -> Lane:
        """Return a backend that takes a job; `kind` None: of an operator. Raises RefusedError."""
        lane = self._lanes.get(name)
        if lane is None:
            raise RefusedError(f"there is no backend {name}")
        if why := lane.not_open() if kind is None else lane.refusal(kind):
            raise RefusedError(why)
        return lane

    def _named(self) -> bytes:
        if self._namespace is None:
            raise RefusedError("there is no namespace yet")
        return self._namespace

    def _must_lead(self) -> None:
        if not self._home.leads:
            raise RefusedError("markers belong to the store of place (0, 0)")

    def _pool_of(self, message: Fetch | Put) -> SlotPool:
        """Return the pool of a job whose slots fit it. Raises RefusedError."""
        if self._next_pool is not None:
            raise RefusedError("the pool is being replaced")
        if self._pool is None:
            raise RefusedError(self._pool_error)
        if self._pool.generation != message.generation:
            raise RefusedError(f"the pool is of generation {self._pool.generation}, the job of {message.generation}")
        chunks = [message.slots] if isinstance(message, Put) else message.slots
        if not all(slots and self._pool.has(slots) for slots in chunks):
            raise RefusedError(f"a slot of the job is outside of the pool of {self._pool.slots}")
        if isinstance(message, Fetch) and not len(message.keys) == len(message.slots) == len(message.sums):
            raise RefusedError("keys, slots and checksums of the job differ in number")
        return self._pool

    def _refusal(self, message: Question, why: str) -> msgspec.Struct:
        place = self._home.place
        if isinstance(message, Find):
            return Found(message.job, [], why)
        if isinstance(message, Fetch):
            return Fetched(*place, message.job, 0, 0.0, why)
        if isinstance(message, Put):
            return Stored(*place, message.job, 0, b"", 0.0, why)
        return Done(*place, message.job, "", why)

    def _answer(self, job: Job) -> None:
        del self._jobs[job.number]
        if not self._silent:
            if isinstance(job, ClearJob):
                self._send(self.figures())  # the bytes that are gone, before it is known to be done
            self._send(job.answer())
        self._swap_pool()

    def _delete(self, message: Delete) -> None:
        lane = self._lanes.get(message.backend)
        if lane is None or self._namespace is None:
            return
        names = self._home.names.take(message.backend, message.keys)
        if self._home.leads:
            names = [*(marker_key(self._namespace, key) for key in message.keys), *names]

        def work(backend: Backend, _: Bounce) -> int:
            backend.delete(names)
            return 0

        def end(outcome: Outcome) -> None:
            if outcome.error:
                log.warning("%s: %d objects are not deleted: %s", message.backend, len(names), outcome.error)

        lane.submit(Task("delete", work, end))

    # --- pool and backends ----------------------------------------------------------------------------------

    def _end_pool_jobs(self, why: str) -> None:
        for job in [job for job in self._jobs.values() if job.uses_pool]:
            job.end(why)

    def _swap_pool(self) -> None:
        """Map the next pool, once no job of the older one is left."""
        message = self._next_pool
        if message is None or any(job.uses_pool for job in self._jobs.values()):
            return
        self._next_pool = None
        self._drop_pool()
        try:
            self._pool = SlotPool(message)
        except (OSError, ValueError) as error:
            self._pool_error = f"the pool cannot be mapped: {error}"
            log.warning("%s", self._pool_error)

    def _drop_pool(self) -> None:
        if self._pool is not None and not any(job.uses_pool for job in self._jobs.values()):
            self._pool.close()
            self._pool = None
            self._pool_error = "there is no pool yet"

    def _use(self, specs: list[BackendSpec]) -> None:
        """Keep the backends that are the same, close the others, open new ones."""
        before, self._lanes = self._lanes, {}
        for spec in specs:
            lane = before.get(spec.name)
            if lane is not None and _place_of(lane.spec) == _place_of(spec):
                lane.use(spec)
                del before[spec.name]
            else:
                lane = self._make_lane(spec, self._home)
            self._lanes[spec.name] = lane
        for name, lane in before.items():
            lane.close()
            self._retired.append(lane)
            if name not in self._lanes:
                self._home.names.forget(name)


def _place_of(spec: BackendSpec) -> tuple[str, str, int]:
    return spec.kind, spec.url, spec.quota_bytes
