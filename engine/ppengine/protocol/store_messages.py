"""Messages between the core and the stores, on the socket `stores`. A store's routing id is its role, as `store0.1`.

A job is a question of the core with a number of its own. It gets one answer, also after `Cancel` or its deadline. A
chunk's `key` is the digest of its last block; the store adds namespace and place.
"""

from __future__ import annotations

import msgspec


class OpenPool(msgspec.Struct, tag="open-pool", array_like=True):
    """Host slots of the store's place: a descriptor of the stage's process. It replaces an older pool.

    Slot `n` has the bytes `[n * slot_bytes, (n + 1) * slot_bytes)`. Jobs of the older pool end first, with an error.
    """

    generation: int
    pid: int
    fd: int
    slots: int
    slot_bytes: int


class UseNamespace(msgspec.Struct, tag="use-namespace", array_like=True):
    """All further jobs are about this namespace. Before the first one every job fails."""

    namespace: bytes


class BackendSpec(msgspec.Struct, array_like=True, frozen=True):
    """One backend as the stores use it."""

    name: str
    kind: str
    url: str
    quota_bytes: int
    """Most bytes of this place's share."""
    timeout_ms: int
    paused: bool = False
    """No job but `Test` and `Clear` is taken."""
    draining: bool = False
    """It is read, and not written."""


class UseBackends(msgspec.Struct, tag="use-backends", array_like=True):
    """Exactly these backends: others are closed when their calls under way have ended, new ones are opened."""

    backends: list[BackendSpec]
    changes: int = 0
    """Number of these settings, which the figures repeat."""


class Find(msgspec.Struct, tag="find", array_like=True):
    """Which chunks are there? To the store of place (0, 0) alone."""

    job: int
    keys: list[bytes]
    """Chunks of one prompt in order."""
    deadline_ms: int


class Fetch(msgspec.Struct, tag="fetch", array_like=True):
    """Read chunks into slots, in order, and end at the first that fails."""

    job: int
    generation: int
    backend: str
    keys: list[bytes]
    slots: list[list[int]]
    """Slots of each chunk, a block each."""
    sums: list[bytes]
    """Checksum of this place's shard of each chunk, from its marker."""
    deadline_ms: int


class Put(msgspec.Struct, tag="put", array_like=True):
    """Write one chunk from its slots, which stay unchanged until the answer."""

    job: int
    generation: int
    backend: str
    key: bytes
    slots: list[int]
    deadline_ms: int


class Marker(msgspec.Struct, array_like=True, frozen=True):
    """The content of a chunk's marker, one entry a place in the order of `Groups`."""

    lengths: list[int]
    sums: list[bytes]
    blocks: int


class Mark(msgspec.Struct, tag="mark", array_like=True):
    """Write a chunk's marker: all shards are there. To the store of place (0, 0) alone."""

    job: int
    backend: str
    key: bytes
    marker: Marker
    deadline_ms: int


class Delete(msgspec.Struct, tag="delete", array_like=True):
    """Delete the marker (place (0, 0)) and the shard of chunks that this place has read or written last.

    Shards that another engine wrote under the same key, with other checksums, stay. It is no job and has no answer.
    """

    backend: str
    keys: list[bytes]


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """Answer a job as soon as nothing writes into its slots any more."""

    job: int


class Clear(msgspec.Struct, tag="clear", array_like=True):
    """Delete all chunks of this namespace of a backend: markers first."""

    job: int
    backend: str


class Test(msgspec.Struct, tag="test", array_like=True):
    """Write, find, read, compare and delete one object of some MiB in a backend."""

    job: int
    backend: str


class StoreReady(msgspec.Struct, tag="store-ready", array_like=True):
    """A store has begun; it has no pool, namespace or backend, and no job."""

    stage: int
    rank: int
    pid: int
    node: str = ""
    """Name of its node, whose pid that is; empty: the engine's own host."""
    kinds: dict[str, str] = {}
    """Kinds of backends that are installed where it runs, each with what it lacks, or an empty text."""


class Weights(msgspec.Struct, tag="weights", array_like=True):
    """Hash of the weight files, from the store of place (0, 0)."""

    digest: bytes
    error: str = ""
    """Why there is none, in one line."""


class FoundChunk(msgspec.Struct, array_like=True, frozen=True):
    """A chunk that is there."""

    backend: str
    marker: Marker


class Found(msgspec.Struct, tag="found", array_like=True):
    """The chunks of the longest prefix of the keys that are there."""

    job: int
    chunks: list[FoundChunk]
    error: str = ""


class Fetched(msgspec.Struct, tag="fetched", array_like=True):
    """The end of a `Fetch`: nothing writes into its slots from here on."""

    stage: int
    rank: int
    job: int
    good: int
    """Chunks that are whole in their slots, from the first on."""
    ms: float
    error: str = ""
    """Why the next one failed, in one line."""
    corrupt: bool = False
    """Whether it failed by its checksum, its length or its header."""
    missing: bool = False
    """Whether its shard is not there, though its marker is."""


class Stored(msgspec.Struct, tag="stored", array_like=True):
    """The end of a `Put`."""

    stage: int
    rank: int
    job: int
    length: int
    sum: bytes
    ms: float
    error: str = ""


class Done(msgspec.Struct, tag="done", array_like=True):
    """The end of a `Mark`, `Clear` or `Test`."""

    stage: int
    rank: int
    job: int
    text: str
    error: str = ""


class BackendFigures(msgspec.Struct, array_like=True):
    """One backend of one store since the store's start; milliseconds of the calls of the last minute."""

    name: str
    state: str
    """`opening`, `open`, `broken`, `paused`, `draining`."""
    breaker: str
    """State for lookups and reads: `closed`, `open`, `half-open`."""
    error: str
    """Newest error; empty: none since the last success of such a call."""
    used_bytes: int
    """Bytes of this place's shards; -1: unknown."""
    queue: int
    read_bytes: int
    written_bytes: int
    reads: int
    writes: int
    errors: int
    corrupt: int
    evicted: int
    """Shards deleted for the quota."""
    read_p50_ms: float
    read_p99_ms: float
    write_p50_ms: float
    write_p99_ms: float
    """-1: no call."""
    threads: int = 1
    """Calls that may be under way at once."""
    write_breaker: str = "closed"
    """State for writes."""


class StoreFigures(msgspec.Struct, tag="store-figures", array_like=True):
    """Figures of a store, twice a second; they are its sign of life, too."""

    stage: int
    rank: int
    backends: list[BackendFigures]
    changes: int = 0
    """Number of the settings that they are about; 0: it has none yet."""


ToStore = OpenPool | UseNamespace | UseBackends | Find | Fetch | Put | Mark | Delete | Cancel | Clear | Test
FromStore = StoreReady | Weights | Found | Fetched | Stored | Done | StoreFigures
