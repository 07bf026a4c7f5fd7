"""The backends that the core knows: their settings, totals, and the form in which stores get them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ppengine.common.tier_config import BackendConfig
from ppengine.core.journal_records import BackendState
from ppengine.protocol.store_messages import BackendSpec

TRY_S = 2.0
"""Seconds after which a backend with an open breaker gets a job again: the store decides whether it tries."""


@dataclass(eq=False, slots=True)
class Backend:
    """One backend."""

    name: str
    config: BackendConfig
    paused: bool = False
    draining: bool = False
    hit_tokens: int = 0
    """Tokens that starts loaded from it before this core, which count until this one serves."""
    declined: int = 0
    """Fetches that were not begun, because computing was predicted to be faster."""
    read_broken: bool = False
    """Whether its breaker of lookups and reads is open at a place."""
    write_broken: bool = False
    """Whether its breaker of writes is open at a place."""
    shut: bool = False
    """Whether a store has not opened it: it refuses all jobs."""
    read_at: float = 0.0
    """Time of its newest fetch."""
    written_at: float = 0.0
    """Time of its newest put."""
    threads: int = 1
    """Calls that each store may have under way at once."""

    @property
    def broken(self) -> bool:
        """Whether a breaker is open at a place."""
        return self.read_broken or self.write_broken

    @property
    def quota_bytes(self) -> int:
        """Most bytes, all places together."""
        return int(self.config.quota_gib * 2**30)


@dataclass(eq=False)
class Backends:
    """All backends, in the order of the profile, then as they were added."""

    _profile: Mapping[str, BackendConfig]
    _clock: Callable[[], float]
    _known: dict[str, Backend] = field(init=False)
    changes: int = field(init=False, default=1)
    """Number of changes, by which a store that has older settings is known."""

    def __post_init__(self) -> None:
        self._known = {name: Backend(name, config) for name, config in self._profile.items()}

    def __iter__(self) -> Iterator[Backend]:
        return iter(list(self._known.values()))

    def __len__(self) -> int:
        return len(self._known)

    def get(self, name: str) -> Backend | None:
        """Return a backend by name."""
        return self._known.get(name)

    def add(self, backend: Backend) -> None:
        """Add a backend."""
        self._known[backend.name] = backend
        self.changes += 1

    def remove(self, name: str) -> None:
        """Forget a backend."""
        if self._known.pop(name, None) is not None:
            self.changes += 1

    def change(self, backend: Backend, *, paused: bool, draining: bool) -> None:
        """Change what a backend may do."""
        backend.paused, backend.draining = paused, draining
        self.changes += 1

    def readable(self) -> list[str]:
        """Return the names of the backends that may be read."""
        return [
            one.name
            for one in self._known.values()
            if not one.paused and self._may_try(one, one.read_broken, one.read_at)
        ]

    def wanting(self) -> list[Backend]:
        """Return the backends that get new chunks, those included that fail now."""
        return [one for one in self._known.values() if not one.paused and not one.draining]

    def writable(self) -> list[Backend]:
        """Return the backends that may be written now."""
        return [one for one in self.wanting() if self._may_try(one, one.write_broken, one.written_at)]

    def note_read(self, name: str) -> None:
        """Note that a backend gets a fetch."""
        if (backend := self._known.get(name)) is not None:
            backend.read_at = self._clock()

    def note_write(self, name: str) -> None:
        """Note that a backend gets a put."""
        if (backend := self._known.get(name)) is not None:
            backend.written_at = self._clock()

    def _may_try(self, backend: Backend, broken: bool, tried: float) -> bool:
        return not backend.shut and (not broken or self._clock() - tried >= TRY_S)

    def specs(self, share: float) -> list[BackendSpec]:
        """Return the settings for the store of a place that has `share` of the bytes of a block."""
        return [
            BackendSpec(
                name=one.name, kind=one.config.kind, url=one.config.url,
                quota_bytes=max(1, int(one.quota_bytes * share)), timeout_ms=one.config.timeout_ms,
                paused=one.paused, draining=one.draining,
            )
            for one in self._known.values()
        ]  # fmt: skip

    # --- a core before or after this one --------------------------------------------------------------------

    def state(self, hit_tokens: Callable[[Backend], int]) -> list[BackendState]:
        """Return everything for the journal."""
        return [
            BackendState(one.name, one.config, one.paused, one.draining, hit_tokens(one), one.declined)
            for one in self._known.values()
        ]

    def restore(self, states: Iterable[BackendState]) -> None:
        """Go on with the backends of the core before this one; those of the profile that it removed stay away."""
        self._known = {
            one.name: Backend(
                one.name, one.config, paused=one.paused, draining=one.draining, hit_tokens=one.hit_tokens,
                declined=one.declined,
            )
            for one in states
        }  # fmt: skip
        self.changes += 1
