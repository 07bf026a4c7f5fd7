"""Profile keys of KV tiers: the host cache and its backends."""

from __future__ import annotations

import posixpath
from typing import Annotated

import msgspec
from msgspec import Meta

from ppengine.protocol.backend_fields import (
    BackendKind,
    BackendName,
    BackendUrl,
    QuotaGib,
    TimeoutMs,
    WritePolicy,
)

__all__ = ["BACKENDS_MOST", "BackendConfig", "BackendName", "TierConfig"]

BACKENDS_MOST = 8


class BackendConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One backend of the stores."""

    kind: BackendKind
    """`memory`, `files`, `valkey`, `s3`, or the name of an installed backend."""
    url: BackendUrl = ""
    """Its place: a folder of `files`, `redis://HOST:PORT/0`, `s3://BUCKET/PREFIX`."""
    quota_gib: QuotaGib = 16.0
    """Most bytes that it keeps for all places together; the least recently used chunks go first."""
    write: WritePolicy = "reused"
    """Chunks that it gets: always; reused: at the second use; evicted: before their host slots are."""
    timeout_ms: TimeoutMs = 2000
    """Milliseconds for one call."""

    @property
    def place(self) -> tuple[str, str] | None:
        """Kind and place in one form, by which two backends would have the same objects; None: it shares none.

        `/kv/./a/` is `/kv/a`, and a server of Valkey without a number is number 0.
        """
        if not self.url or self.kind == "memory":
            return None
        if self.url.startswith("/"):
            return self.kind, posixpath.normpath(self.url)
        url = self.url.rstrip("/")
        return self.kind, url.removesuffix("/0") if self.kind == "valkey" else url


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV blocks outside of the device."""

    host: bool = False
    """Keep blocks in the part of the swap space that swapped requests do not need."""
    out_mib: Annotated[float, Meta(gt=0, le=2**16)] | None = None
    """Most MiB that a step copies to the host cache, on each stage, beside as many tokens as it computes.

    None: 8 on CPUs, 16 on GPUs."""
    in_mib: Annotated[float, Meta(gt=0, le=2**16)] | None = None
    """Most MiB that a step copies from the host cache, on each stage.

    None: 16 on CPUs, 128 on GPUs, and four times that while no other request runs."""
    least_tokens: Annotated[int, Meta(ge=1, le=2**22)] = 64
    """Shortest prefix that is loaded; a shorter one is computed."""
    find_ms: Annotated[int, Meta(ge=1, le=60_000)] = 100
    """Most milliseconds that a request waits for an answer about its chunks."""
    fetch_ms: Annotated[int, Meta(ge=1, le=600_000)] = 2000
    """Most milliseconds that a request waits for its chunks."""
    fetches: Annotated[int, Meta(ge=1, le=1024)] = 8
    """Most requests that fetch at once."""
    backends: dict[str, BackendConfig] = {}
    """Backends by name; they need `host`."""
