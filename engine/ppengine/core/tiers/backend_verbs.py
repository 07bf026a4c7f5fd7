"""Verbs on backends, all of them live: requests go on, with the chunks that they can get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ppengine.common.sizes import counted, size_text
from ppengine.common.tier_config import BACKENDS_MOST, BackendConfig
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError, Plan
from ppengine.core.tiers.backend_care import BackendCare
from ppengine.core.tiers.backends import Backend
from ppengine.core.tiers.store_desk import StoreDesk
from ppengine.protocol.backend_fields import without_secrets
from ppengine.protocol.control import Command
from ppengine.protocol.store_verbs import (
    StoreAdd,
    StoreClear,
    StoreDrain,
    StorePause,
    StoreRemove,
    StoreResume,
    StoreTest,
    StoreVerb,
)

HEADER = 4096
"""Most bytes of the header of a shard, with its padding."""
OPEN_S = 30.0
"""Seconds in which stores must have opened a new backend."""


@dataclass(eq=False, slots=True)
class _Opening:
    """A backend that is being opened by the stores, after it was added or resumed."""

    operation: Operation
    until: float


@dataclass(eq=False)
class BackendVerbs:
    """Plans and carries out the verbs; the settings are in `Backends`."""

    _desk: StoreDesk
    _host: bool
    """Whether the profile has a host cache."""
    _operations: Operations
    _clock: Callable[[], float]
    _care: BackendCare = field(init=False)
    _opening: dict[str, _Opening] = field(init=False, default_factory=dict)
    _draining: dict[str, Operation] = field(init=False, default_factory=dict)
    _leaving: dict[str, tuple[Operation, str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._care = BackendCare(self._desk, self._operations, self._clock)

    def plan(self, verb: StoreVerb, command: Command) -> Plan:
        """Return the plan of a verb. Raises CommandError."""
        if not self._host:
            text = "tiers.host is false in the profile; set it to true and start the engine again"
            raise CommandError("UNSUPPORTED", text)
        if isinstance(verb, StoreAdd):
            return self._plan_add(verb)
        backend = self._desk.backends.get(verb.backend)
        if backend is None:
            raise CommandError("NOT_FOUND", f"there is no backend {verb.backend}")
        match verb:
            case StorePause():
                return self._plan_pause(backend, command)
            case StoreResume():
                return self._plan_resume(backend, command)
            case StoreDrain():
                return self._plan_drain(backend, command)
            case StoreRemove():
                return self._plan_remove(backend, command)
            case StoreTest():
                return self._care.plan_test(backend)
            case StoreClear():
                return self._care.plan_clear(backend)

    def settle(self) -> None:
        """End operations whose effect has happened; report the progress of the others."""
        now = self._clock()
        for name, opening in list(self._opening.items()):
            self._settle_opening(name, opening, now)
        for name, operation in list(self._draining.items()):
            if left := self._desk.writer.under_way_of(name):
                self._operations.defer(operation, f"waits for {counted(left, 'chunk')} under way to {name}")
            else:
                del self._draining[name]
                if (backend := self._desk.backends.get(name)) is not None:
                    self._desk.backends.change(backend, paused=False, draining=True)
                    self._desk.changed()
                self._operations.end(operation, "applied", f"{name} is read, and gets nothing new")
        for name, (operation, fate) in list(self._leaving.items()):
            if left := self._desk.jobs.about(name):
                self._operations.defer(operation, f"waits for {counted(left, 'call')} of {name}")
            else:
                del self._leaving[name]
                self._operations.end(operation, "applied", f"{name} is removed; {fate}")

    # --- settings -------------------------------------------------------------------------------------------

    def _plan_add(self, verb: StoreAdd) -> Plan:
        name, desk = verb.backend, self._desk
        if desk.backends.get(name) is not None:
            raise CommandError("CONFLICT", f"there is a backend {name} already; choose another name")
        if name in self._leaving:
            raise CommandError("BUSY", f"{name} is being removed; try again when that has ended")
        config = BackendConfig(
            kind=verb.kind, url=verb.url, quota_gib=verb.quota_gib, write=verb.write, timeout_ms=verb.timeout_ms
        )
        if (same := self._at(config)) is not None:
            raise CommandError("CONFLICT", f"{same.name} is there already; a quota counts all chunks of one place")
        if len(desk.backends) >= BACKENDS_MOST:
            raise CommandError("DOES_NOT_FIT", f"there are {BACKENDS_MOST} backends, the most; remove one first")
        if private := desk.links.private_slots:
            raise CommandError("UNSUPPORTED", f"{private}; start the engine with a backend in the profile")
        if why := desk.links.why_not_kind(verb.kind):
            raise CommandError("UNSUPPORTED", why)
        self._check_quota(verb)
        place = f" at {without_secrets(verb.url)}" if verb.url else ""
        line = f"add {name}: {verb.kind}{place}, {verb.quota_gib:g} GiB, write {verb.write}"

        def begin(operation: Operation) -> None:
            desk.add(Backend(name, config))
            self._await_open(operation, name, "")

        return Plan([line], begin, target=name)

    def _at(self, config: BackendConfig) -> Backend | None:
        """Return the backend that has the same objects."""
        known = self._desk.backends if config.place is not None else ()
        return next((one for one in known if one.config.place == config.place), None)

    def _check_quota(self, verb: StoreAdd) -> None:
        """Raise CommandError for a quota that no chunk fits in: each write would fail."""
        pools, quota = self._desk.links.pools, int(verb.quota_gib * 2**30)
        least = 0 if pools is None else sum(size * pools.chunk_blocks + HEADER for size in pools.slot_bytes.values())
        if quota < least:
            text = f"a chunk has {size_text(least)} on all stages, and a quota of {size_text(quota)} keeps none"
            raise CommandError("DOES_NOT_FIT", f"{text}; quota_gib must be at least {1.01 * least / 2**30:.3g}")

    def _await_open(self, operation: Operation, name: str, why: str) -> None:
        """End an operation when the stores have opened a backend; an older one that waits for it ends with `why`."""
        self._end_opening(name, why)
        self._opening[name] = _Opening(operation, self._clock() + OPEN_S)
        self.settle()

    def _end_opening(self, name: str, why: str) -> None:
        if (opening := self._opening.pop(name, None)) is not None:
            self._operations.end(opening.operation, "superseded", why)

    def _settle_opening(self, name: str, opening: _Opening, now: float) -> None:
        stores = self._desk.links.records.values()
        figures = [store.figures[name] for store in stores if name in store.figures]
        failed = next((one for one in figures if one.state == "broken"), None)
        if failed is not None:
            # It stays, and the stores try again: the place may come back.
            text = f"{name} cannot be opened: {failed.error}; {_kept(name)}"
            self._operations.end(opening.operation, "failed", text)
        elif len(figures) == len(stores) and all(one.state != "opening" for one in figures):
            self._operations.end(opening.operation, "applied", f"{name} is open")
        elif now >= opening.until:
            why = self._desk.links.why_not_ready or "the stores have not opened it"
            self._operations.end(opening.operation, "failed", f"{why} after {OPEN_S:.0f} s; {_kept(name)}")
        else:
            self._operations.defer(opening.operation, f"{name} is being opened")
            return
        del self._opening[name]

    def _plan_pause(self, backend: Backend, command: Command) -> Plan:
        name = backend.name
        line = f"neither read nor write {name}" + ("; its drain ends" if backend.draining else "")
        if backend.paused:
            line = f"nothing changes: {name} is paused already"

        def begin(operation: Operation) -> None:
            self._supersede(name, f"{line}, by {command.by}")
            self._end_opening(name, f"paused by {command.by}" + (f": {command.reason}" if command.reason else ""))
            self._desk.backends.change(backend, paused=True, draining=False)
            self._desk.changed()
            self._operations.end(operation, "applied", line)

        return Plan([line], begin, target=name)

    def _plan_resume(self, backend: Backend, command: Command) -> Plan:
        name, fails = backend.name, backend.broken or backend.shut or backend.name in self._opening
        line = f"read and write {name}" + (", and open it again" if fails else "")
        if not (fails or backend.paused or backend.draining):
            line = f"nothing changes: {name} is in use already"

        def begin(operation: Operation) -> None:
            self._supersede(name, f"{line}, by {command.by}")
            self._desk.backends.change(backend, paused=False, draining=False)
            if fails:
                self._desk.links.reopen(backend)
                self._desk.costs.forget(name)
            self._desk.changed()
            if fails:
                self._await_open(operation, name, f"opened again by {command.by}")
            else:
                self._operations.end(operation, "applied", line)

        return Plan([line], begin, target=name)

    def _plan_drain(self, backend: Backend, command: Command) -> Plan:
        name, under_way = backend.name, self._desk.writer.under_way_of(backend.name)
        drained = backend.draining and name not in self._draining
        line = f"write nothing new to {name}, and read it on"
        if drained:
            line = f"nothing changes: {name} is draining already"
        elif backend.paused:
            line += "; its pause ends"
        elif under_way:
            line += f"; {counted(under_way, 'chunk')} under way to it {'is' if under_way == 1 else 'are'} written first"

        def begin(operation: Operation) -> None:
            if drained:
                self._operations.end(operation, "applied", line)
                return
            self._supersede(name, f"drained by {command.by}")
            # Stores refuse puts once they know it, so those under way end first.
            backend.paused, backend.draining = False, True
            self._desk.writer.drop_candidates(name)
            self._draining[name] = operation
            self.settle()

        return Plan([line], begin, target=name)

    def _plan_remove(self, backend: Backend, command: Command) -> Plan:
        name, calls = backend.name, self._desk.jobs.about(backend.name)
        fate = "its chunks end with it" if backend.config.kind == "memory" else "its chunks stay where they are"
        after = f", after {counted(calls, 'call')} under way" if calls else ""
        lines = [f"forget {name}{after}", fate]

        def begin(operation: Operation) -> None:
            self._supersede(name, f"removed by {command.by}")
            self._end_opening(name, "it was removed before it was open")
            self._desk.forget(name)
            self._leaving[name] = operation, fate
            self.settle()

        return Plan(lines, begin, target=name)

    def _supersede(self, name: str, why: str) -> None:
        if (operation := self._draining.pop(name, None)) is not None:
            self._operations.end(operation, "superseded", why)


def _kept(name: str) -> str:
    return (
        f"it is kept and tried again; when that is mended, store test {name} opens it; store remove {name} forgets it"
    )
