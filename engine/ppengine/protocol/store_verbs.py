"""Verbs on backends of KV tiers. A place may have a password in it: it is shown nowhere, and kept from `repr`, too."""

from __future__ import annotations

import msgspec

from ppengine.protocol.backend_fields import (
    URL_MOST,
    BackendKind,
    BackendName,
    QuotaGib,
    TimeoutMs,
    WritePolicy,
    without_secrets,
)
from ppengine.protocol.kinds import check_kind


class _OfBackend(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A verb on one backend, by its name."""

    backend: str

    def __post_init__(self) -> None:
        """Check the name."""
        check_kind("backend", without_secrets(self.backend), BackendName)


class StoreAdd(_OfBackend, tag="store-add", kw_only=True, forbid_unknown_fields=True):
    """Add a backend while the engine runs. It is forgotten when the engine ends."""

    kind: str
    """Kind of backend, as in the profile."""
    url: str = ""
    """Its place, as in the profile."""
    quota_gib: float = 16.0
    """Most bytes that it keeps for all places together."""
    write: WritePolicy = "reused"
    """Chunks that it gets."""
    timeout_ms: int = 2000
    """Milliseconds for one call."""

    def __post_init__(self) -> None:
        """Check all fields."""
        super().__post_init__()
        check_kind("kind", without_secrets(self.kind), BackendKind)
        if len(self.url) > URL_MOST or not self.url.isprintable():
            raise ValueError(f"url has {len(self.url)} characters; it must be 0 to {URL_MOST} printable characters")
        check_kind("quota_gib", self.quota_gib, QuotaGib)
        check_kind("write", self.write, WritePolicy)
        check_kind("timeout_ms", self.timeout_ms, TimeoutMs)

    def __repr__(self) -> str:
        """Return the message without a password."""
        values = {**msgspec.structs.asdict(self), "url": without_secrets(self.url)}
        return f"StoreAdd({', '.join(f'{name}={value!r}' for name, value in values.items())})"


class StorePause(_OfBackend, tag="store-pause", kw_only=True, forbid_unknown_fields=True):
    """Neither read a backend nor write it, until `store resume`. Its chunks stay."""


class StoreResume(_OfBackend, tag="store-resume", kw_only=True, forbid_unknown_fields=True):
    """End the pause or the drain of a backend, and close its breakers."""


class StoreDrain(_OfBackend, tag="store-drain", kw_only=True, forbid_unknown_fields=True):
    """Write nothing new to a backend, and read it on, until `store resume`."""


class StoreRemove(_OfBackend, tag="store-remove", kw_only=True, forbid_unknown_fields=True):
    """Forget a backend when its calls under way have ended. Its chunks stay, those of kind memory end."""


class StoreTest(_OfBackend, tag="store-test", kw_only=True, forbid_unknown_fields=True):
    """Write, find, read, compare and delete one object in a backend, from every place."""


class StoreClear(_OfBackend, tag="store-clear", kw_only=True, forbid_unknown_fields=True):
    """Delete all chunks of this model from a backend."""


StoreVerb = StoreAdd | StorePause | StoreResume | StoreDrain | StoreRemove | StoreTest | StoreClear
"""Verbs on a backend."""
