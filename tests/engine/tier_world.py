"""A core with stores that the test answers for: their backends are dicts, and their slots know what they hold."""

from __future__ import annotations

from core_world import CoreWorld
from ppengine.common.tier_config import BackendConfig, TierConfig
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessInfo, ProcessReport
from ppengine.protocol.steps import MoveKind
from ppengine.protocol.store_messages import (
    BackendFigures,
    Cancel,
    Clear,
    Delete,
    Done,
    Fetch,
    Fetched,
    Find,
    Found,
    FoundChunk,
    Mark,
    OpenPool,
    Put,
    Stored,
    StoreFigures,
    StoreReady,
    Test,
    UseBackends,
    UseNamespace,
    Weights,
)
from scheduler_invariants import check_host_cache

CHUNK = 256
"""Tokens of a chunk."""
BLOCKS = CHUNK // 8
KINDS = {"memory": "", "files": "", "valkey": "", "s3": ""}
"""Kinds of backends that each store knows; they lack nothing."""


class Disk:
    """The backends of all stores: they outlive engines."""

    def __init__(self):
        self.shards = {}
        """(backend, namespace, key, place): digests of the blocks."""
        self.markers = {}
        """(backend, namespace, key): the marker."""


class SimStore:
    """One store. Its jobs wait until the test answers them."""

    def __init__(self, world, place, pid):
        self.world, self.place, self.pid = world, place, pid
        self.pool = 0
        self.namespace = b""
        self.specs = {}
        self.changes = 0
        self.jobs = {}
        self.cancelled = []

    def take(self, message):
        disk, core = self.world.disk, self.world
        match message:
            case OpenPool():
                # Jobs of the older pool end with an error when the test answers them.
                self.pool = message.generation
            case UseNamespace():
                self.namespace = message.namespace
            case UseBackends():
                self.specs, self.changes = {spec.name: spec for spec in message.backends}, message.changes
            case Cancel():
                self.cancelled.append(message.job)
            case Delete():
                for key in message.keys:
                    disk.shards.pop((message.backend, self.namespace, key, self.place), None)
                    if self.place == (0, 0):
                        disk.markers.pop((message.backend, self.namespace, key), None)
            case _:
                assert message.job not in self.jobs, "a job is given twice"
                assert message.job not in core.given.get(self.place, set()), "a number is used twice"
                core.given.setdefault(self.place, set()).add(message.job)
                self.jobs[message.job] = message

    def say(self, message):
        self.world.engine.tiers.take(self.place.store_role.encode(), message)

    def answer(self, number, *, good=None, error="", corrupt=False):
        """Answer a job; `good`: chunks of a fetch that are read before `error`."""
        job = self.jobs.pop(number)
        match job:
            case Find():
                self.say(Found(number, [] if error else self._found(job), error))
            case Fetch():
                self._fetch(job, good, error, corrupt)
            case Put():
                self._put(job, error)
            case Mark():
                if not error:
                    self.world.disk.markers[job.backend, self.namespace, job.key] = job.marker
                self.say(Done(*self.place, number, "", error))
            case Clear() | Test():
                if isinstance(job, Clear):
                    self._clear(job.backend)
                self.say(Done(*self.place, number, "done", error))

    def _found(self, job):
        chunks = []
        for key in job.keys:
            names = [name for name in self.specs if (name, self.namespace, key) in self.world.disk.markers]
            if not names:
                break
            chunks.append(FoundChunk(names[0], self.world.disk.markers[names[0], self.namespace, key]))
        return chunks

    def _fetch(self, job, good, error, corrupt):
        most = len(job.keys) if good is None else min(good, len(job.keys))
        if job.generation != self.pool:
            most, error = 0, error or "the pool is of another generation"
        count, missing, reserved = 0, False, self.world.cache._reserved
        for key, slots in zip(job.keys[:most], job.slots, strict=False):
            content = self.world.disk.shards.get((job.backend, self.namespace, key, self.place))
            if content is None:
                missing = not error
                error = error or f"{key.hex()} is not there"
                break
            for slot, digest in zip(slots, content, strict=True):
                assert slot in reserved, f"slot {slot} is written and not reserved"
                self.world.content[self.place][slot] = digest
            count += 1
        if count < len(job.keys) and not error:
            error = "half a shard"
        self.say(Fetched(*self.place, job.job, count, 1.0, error if count < len(job.keys) else "", corrupt, missing))

    def _put(self, job, error):
        if job.generation != self.pool:
            error = error or "the pool is of another generation"
        if not error:
            content = [self.world.content[self.place].get(slot) for slot in job.slots]
            assert content[-1] == job.key, "the slots of a put have changed"
            self.world.disk.shards[job.backend, self.namespace, job.key, self.place] = content
        self.say(Stored(*self.place, job.job, 0 if error else 99, b"" if error else b"sum", 1.0, error))

    def _clear(self, backend):
        disk = self.world.disk
        for name in [name for name in disk.shards if name[0] == backend and name[3] == self.place]:
            del disk.shards[name]
        if self.place == (0, 0):
            for name in [name for name in disk.markers if name[0] == backend]:
                del disk.markers[name]

    def figures(self, **fields):
        """Send figures; `fields` of all backends."""
        default = {
            "state": "open", "breaker": "closed", "error": "", "used_bytes": 0, "queue": 0, "read_bytes": 0,
            "written_bytes": 0, "reads": 0, "writes": 0, "errors": 0, "corrupt": 0, "evicted": 0, "read_p50_ms": -1.0,
            "read_p99_ms": -1.0, "write_p50_ms": -1.0, "write_p99_ms": -1.0,
            "threads": 4, "write_breaker": "closed",
        }  # fmt: skip
        figures = [BackendFigures(**(default | {"name": name} | fields)) for name in self.specs]
        self.say(StoreFigures(*self.place, figures, self.changes))


class TierWorld(CoreWorld):
    """Stores come at once and know the weights, unless `stores` is false; rates are known if `measured`."""

    def __init__(self, *, disk=None, write="always", stages=2, swap_blocks=640, stores=True, before=None, weights=b"w",
        backends=None, find_ms=100, fetch_ms=2000, fetches=8, measured=True, **fields,
    ):  # fmt: skip
        self.disk = disk or Disk()
        self.stores, self.content, self.given = {}, {}, {}
        self.pids = 100
        self.sources = {}
        """Digests of the blocks that steps in flight copy out, by step and slot."""
        self._swap_blocks = swap_blocks
        chosen = {"nvme0": BackendConfig(kind="files", url="/d", write=write)} if backends is None else backends
        tiers = TierConfig(
            host=True, backends=chosen, find_ms=find_ms, fetch_ms=fetch_ms, fetches=fetches, least_tokens=8,
            out_mib=1.0, in_mib=1.0,
        )  # fmt: skip
        defaults = {"max_model_len": 1280, "slot_bytes": 10, "run_dir": "/r"}
        super().__init__(stages=stages, tiers=tiers, before=before, **(defaults | fields))
        # Steps take no time here.
        costs = self.engine.tiers.costs
        costs.token_s, costs.computed = 1.0, lambda tokens, seconds: None
        for name in chosen if measured else ():
            costs.ended(name, 1, 1e-6)
        if stores:
            for place in self.engine.stages.places:
                self.start(place)
            self.stores[Place(0, 0)].say(Weights(weights))

    @property
    def cache(self):
        """The host cache."""
        return self.scheduler.blocks.copies.cache

    def send_store(self, place, message):
        if place in self.stores:
            self.stores[place].take(message)

    def ready(self, swap_blocks=None, **fields):
        super().ready(swap_blocks=swap_blocks or self._swap_blocks, **fields)

    def _take_step(self, others, last):
        super()._take_step(others, last)
        step, digests = self.steps[-1], self.scheduler.blocks.device._digests
        self.sources[step.number] = {
            move.dst: digests[move.src] for move in step.moves if move.kind == MoveKind.OUT
        }  # fmt: skip

    def retire(self, mapped=None, *, answer=True):
        copied = self.sources.pop(self.steps[0].number)
        for place in self.engine.stages.places:
            self.content.setdefault(place, {}).update(copied)
        return super().retire(mapped, answer=answer)

    # --- stores ---------------------------------------------------------------------------------------------

    def start(self, place):
        """Start the store of a place."""
        self.pids += 1
        self.content.setdefault(place, {})
        store = self.stores[place] = SimStore(self, place, self.pids)
        store.say(StoreReady(*place, self.pids, kinds=KINDS))
        store.figures()

    def kill(self, place, *, reported=True):
        """End a store with SIGKILL; its successor says so unless the supervisor does."""
        store = self.stores.pop(place)
        if reported:
            role = place.store_role
            info = ProcessInfo(role=role, stage=None, rank=None, pid=store.pid, exit_code=-9, detail="killed")
            self.engine.on_processes(ProcessReport(mono_ns=0, processes=[info]))

    def jobs(self, kind=object):
        """Return the open jobs of a kind: (store, number)."""
        return [
            (store, number)
            for store in self.stores.values()
            for number, job in store.jobs.items()
            if isinstance(job, kind)
        ]

    def answer_all(self, kind=object, turns=50):
        """Answer jobs and take turns until nothing is left."""
        for _ in range(turns):
            self.now += 0.03
            for store, number in self.jobs(kind):
                if number in store.jobs:
                    store.answer(number)
            self.run()
            if not self.jobs(kind):
                return

    def lose_stage(self, stage=1):
        """End a stage; another one comes, and all meet again."""
        self.engine.stages[stage, 0].deaths.clear()  # Two within `restart_limit_s` would need an operator.
        info = ProcessInfo(role="stage", stage=stage, rank=0, pid=1, exit_code=-9, detail="killed", generation=1)
        info.generation = self.engine.stages[stage, 0].started
        self.engine.on_processes(ProcessReport(mono_ns=0, processes=[info]))
        self.engine.advance()
        self.steps.clear()
        self.sources.clear()
        self.changing = None
        self.content[Place(stage, 0)] = {}
        self.drained(*[other for other, _ in self.engine.stages.places if other != stage])
        self.ready()
        self.run()
        assert not self.engine.health.blocked

    def fill(self, prompt, name=None, **sampling):
        """Compute a prompt, let its blocks go to slots and its chunks to the backends."""
        self.submit(prompt, name=name, max_tokens=1, **sampling)
        self.answer_all()
        self.now += 0.05
        self.engine.advance()
        self.run()
        self.answer_all()

    def state(self, name):
        """Return the state of a live request."""
        return self.scheduler.queues.requests[name].state

    def check_tiers(self):
        """Raise AssertionError for a slot in two states, or one whose content is not that of its digest."""
        check_host_cache(self.cache)
        for slot, digest in self.cache._digests.items():
            for place, slots in self.content.items():
                assert slots.get(slot) == digest, f"slot {slot} of {place} holds another block"
