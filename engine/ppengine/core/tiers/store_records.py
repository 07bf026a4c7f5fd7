"""One record a store: its sign of life, everything that it was given, and its figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import BackendFigures, StoreFigures, StoreReady

SILENT_S = 5.0
"""Seconds without figures, which come twice a second, after which a store gets no job."""
_COUNTERS = ("read_bytes", "written_bytes", "errors", "corrupt", "evicted")


@dataclass(eq=False, slots=True)
class StoreRecord:
    """Everything that the core knows of the store of a place."""

    place: Place
    name: str
    """Name for operators: `the store of stage 1`."""
    pid: int | None = None
    """None: it has not come, or its pid is not known."""
    node: str = ""
    """Name of its node, whose pid that is; empty: the engine's own host."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Kinds of backends that it knows, each with what it lacks; none: it has not come."""
    seen: float | None = None
    """Time of its newest message; None: it has not come."""
    pool: int = 0
    """Generation of the slots that it has; 0: none."""
    namespace: bytes = b""
    changes: int = 0
    """Number of the backends' settings that it has."""
    figures: dict[str, BackendFigures] = field(default_factory=dict)
    """Newest figures by backend."""
    totals: dict[str, dict[str, int]] = field(default_factory=dict)
    """Counters of its processes and openings before the present one, by backend."""

    def restart(self, ready: StoreReady, now: float) -> None:
        """Note that its process is new: it has nothing."""
        self.lose()
        self.pid, self.node, self.kinds, self.seen = ready.pid, ready.node, ready.kinds, now

    def lose(self) -> None:
        """Note that its process is dead; its counters stay."""
        for figures in self.figures.values():
            self._keep(figures)
        self.figures.clear()
        self.pid, self.kinds, self.seen = None, {}, None
        self.pool, self.namespace, self.changes = 0, b"", 0

    def take(self, message: StoreFigures) -> None:
        """Take the newest figures. Older settings may have another backend of the same name: those are left out."""
        if message.changes == self.changes:
            self.figures = {figures.name: figures for figures in message.backends}

    def forget(self, backend: str) -> None:
        """Forget the figures of a backend that was removed."""
        self.figures.pop(backend, None)
        self.totals.pop(backend, None)

    def close(self, backend: str) -> None:
        """Note that it closes a backend, whose next one has figures of its own; the counters stay."""
        if (figures := self.figures.pop(backend, None)) is not None:
            self._keep(figures)

    def _keep(self, figures: BackendFigures) -> None:
        kept = self.totals.setdefault(figures.name, dict.fromkeys(_COUNTERS, 0))
        for counter in _COUNTERS:
            kept[counter] += getattr(figures, counter)

    def total(self, backend: str, counter: str) -> int:
        """Return a counter of a backend since the boot."""
        now = self.figures.get(backend)
        return self.totals.get(backend, {}).get(counter, 0) + (0 if now is None else int(getattr(now, counter)))

    def answers(self, now: float) -> bool:
        """Return whether it has come and is not silent."""
        return self.seen is not None and now - self.seen < SILENT_S
