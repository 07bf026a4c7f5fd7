"""The stores as the core knows them: whether they answer, and whether they have slots, namespace and backends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.common.config import EngineConfig
from ppengine.core.stage_records import Stages
from ppengine.core.tiers.backends import Backend, Backends
from ppengine.core.tiers.inherited_slots import InheritedSlots
from ppengine.core.tiers.namespace import Shape, namespace_of
from ppengine.core.tiers.open_pools import OpenPools, Send
from ppengine.core.tiers.store_records import StoreRecord
from ppengine.protocol.place import Place
from ppengine.protocol.stage_lifecycle import StageReady
from ppengine.protocol.store_messages import OpenPool, StoreFigures, UseBackends, UseNamespace


@dataclass(eq=False)
class StoreLinks:
    """Owns the records of the stores and sends each what it lacks."""

    _config: EngineConfig
    _spec: ModelSpec
    _stages: Stages
    _backends: Backends
    _send: Send
    _clock: Callable[[], float]
    pools: OpenPools | None = field(init=False, default=None)
    """Slots of the present generation; None while the stages do not serve."""
    weights: bytes = field(init=False, default=b"")
    """Hash of the weight files; empty: not known."""
    weights_error: str = field(init=False, default="")
    namespace: bytes = field(init=False, default=b"")
    """Name of the chunks of this engine; empty: not known."""

    def __post_init__(self) -> None:
        self.inherited = InheritedSlots(self._stages.places)
        self.records = {
            record.place: StoreRecord(record.place, f"the store of {record.name}") for record in self._stages
        }  # fmt: skip

    def by_name(self, name: bytes) -> StoreRecord | None:
        """Return the record of the store with this routing id."""
        return next((one for place, one in self.records.items() if name == place.store_role.encode()), None)

    def take_figures(self, record: StoreRecord, message: StoreFigures) -> None:
        """Take the newest figures of a store; a backend is broken or shut if it is at one place."""
        record.take(message)
        for backend in self._backends:
            figures = [one.figures[backend.name] for one in self.records.values() if backend.name in one.figures]
            backend.read_broken = any(one.breaker == "open" for one in figures)
            backend.write_broken = any(one.write_breaker == "open" for one in figures)
            backend.threads = min((one.threads for one in figures), default=1)
            backend.shut = any(one.state in ("opening", "broken") for one in figures)

    def used_bytes(self, name: str) -> int | None:
        """Return the bytes of a backend, all places together; None: not known."""
        used = [record.figures[name].used_bytes for record in self.records.values() if name in record.figures]
        return sum(used) if len(used) == len(self.records) and min(used, default=-1) >= 0 else None

    def update(self) -> None:
        """Send all stores everything that they lack."""
        self._name()
        for record in self.records.values():
            if record.seen is not None and self.pools is not None:
                self._update(self.pools, record)

    def _update(self, pools: OpenPools, record: StoreRecord) -> None:
        place, ready = record.place, self.ready_by_place()[record.place]
        if record.pool != pools.generation:
            record.pool = pools.generation
            slots = pools.scheduler.blocks.host.size
            self._send(place, OpenPool(pools.generation, ready.pid, ready.slots_fd, slots, ready.slot_bytes))
        if self.namespace and record.namespace != self.namespace:
            record.namespace = self.namespace
            self._send(place, UseNamespace(self.namespace))
        if record.changes != self._backends.changes:
            record.changes = self._backends.changes
            self._send(place, UseBackends(self._backends.specs(pools.share(place)), record.changes))

    def forget(self, name: str) -> None:
        """Forget the figures of a backend that was removed; another one may get its name."""
        for record in self.records.values():
            record.forget(name)

    def reopen(self, backend: Backend) -> None:
        """Let all stores close a backend that fails; the next `update` opens it again, with closed breakers."""
        for place, record in self.records.items():
            if record.seen is not None and self.pools is not None:
                specs = self._backends.specs(self.pools.share(place))
                self._send(place, UseBackends([spec for spec in specs if spec.name != backend.name]))
            record.close(backend.name)
        self._backends.changes += 1
        backend.read_broken = backend.write_broken = backend.shut = False

    def _name(self) -> None:
        """Name the chunks, once weights and slots are known."""
        if self.pools is None or not self.weights:
            return
        profile, ready = self._config.profile, self.ready_by_place().values()
        dtype = profile.model.dtype if profile.model.dtype != "auto" else self._spec.dtype
        shape = Shape(
            self.weights, self._spec.model_type, dtype, profile.memory.block_size, self.pools.chunk_blocks,
            [(first, end) for first, end in self._config.layers], profile.parallel.tensor,
            [each.slot_layout for each in ready], [each.slot_bytes for each in ready],
        )  # fmt: skip
        self.namespace = namespace_of(shape)

    def ready_by_place(self) -> dict[Place, StageReady]:
        """Return the readiness reports of the stages."""
        return {record.place: record.ready for record in self._stages if record.ready is not None}

    def why_not_kind(self, kind: str) -> str:
        """Return why a store cannot open backends of a kind, in one line; empty: all that have come can.

        A store looks for packages when it starts, so the line names the processes that have to be replaced.
        """
        lacking = [one for one in self.records.values() if one.kinds and one.kinds.get(kind, "it is not there")]
        if not lacking:
            return ""
        first = lacking[0]
        why = f"{first.name} has no backend of kind {kind}; it has {', '.join(first.kinds)}"
        if kind in first.kinds:
            why = f"{kind} {first.kinds[kind]}"
        pids: dict[str, list[str]] = {}
        for one in lacking:
            if one.pid is not None:
                pids.setdefault(f" on {one.node}" if one.node else "", []).append(str(one.pid))
        kills = ", ".join(f"kill {' '.join(some)}{node}" for node, some in pids.items())
        return f"{why}. If it was installed since: {kills}; new stores start and find it" if kills else why

    @property
    def private_slots(self) -> str:
        """Name of a stage whose slots no store can map, in one line; empty if there is none."""
        private = next((one for one in self._stages if one.ready is not None and one.ready.slots_fd < 0), None)
        return "" if private is None else f"the host slots of {private.name} are private"

    @property
    def why_not_ready(self) -> str:
        """Reason why backends are not used, in one line; empty if they are, or if there is none."""
        if not len(self._backends):
            return ""
        if self.pools is None:
            return self.private_slots or "the stages do not serve"
        now = self._clock()
        for record in self.records.values():
            if record.seen is None:
                return f"{record.name} has not come"
            if not record.answers(now):
                return f"{record.name} has not answered for {now - record.seen:.0f} s"
        if self.weights_error or not self.namespace:
            return self.weights_error or "the weight files are being hashed"
        return self.inherited.why
