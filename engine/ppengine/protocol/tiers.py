"""KV tiers in a snapshot. Tokens and bytes since the boot, unless they say otherwise; unknown is null."""

from __future__ import annotations

from typing import Literal

import msgspec

from ppengine.protocol.quantiles import Quantiles

BreakerState = Literal["closed", "open", "half-open"]
BackendState = Literal["opening", "open", "broken", "paused", "draining", "unknown"]
"""`unknown`: no store answers."""


class PromptSources(msgspec.Struct, kw_only=True):
    """Tokens of a request's last start by their source; they add up to what it began with."""

    device: int = 0
    """Found in device blocks."""
    host: int = 0
    """Loaded from host slots that were there before it came."""
    backends: dict[str, int] = {}
    """Loaded from host slots that were fetched for it, by backend."""
    computed: int = 0
    """Computed, prompt and known outputs."""


class StoreInfo(msgspec.Struct, kw_only=True):
    """The store of one place."""

    stage: int
    """Pipeline stage."""
    rank: int
    """Tensor rank of the stage."""
    pid: int | None = None
    """Null: it has not come yet."""
    age_ms: float | None = None
    """Age of its last figures."""
    jobs: int = 0
    """Jobs that it owes an answer."""
    lag_ms: float | None = None
    """Age of the oldest of them."""


class BackendInfo(msgspec.Struct, kw_only=True):
    """One backend, over all places."""

    name: str
    """Name in the profile, or that `store add` gave."""
    kind: str
    """Kind of backend."""
    url: str
    """Its place."""
    write: str
    """Chunks that it gets: `always`, `reused`, `evicted`."""
    state: BackendState = "unknown"
    """State of the worst place."""
    breaker: BreakerState = "closed"
    """For lookups and reads, the worst of all places."""
    write_breaker: BreakerState = "closed"
    """For writes, the worst of all places."""
    error: str = ""
    """Newest error of any place; empty: none since the last success."""
    quota_bytes: int
    """Most bytes, all places together."""
    used_bytes: int | None = None
    """Bytes of all shards."""
    hit_tokens_total: int = 0
    """Tokens that starts loaded from it."""
    read_bytes_total: int = 0
    """Bytes read."""
    written_bytes_total: int = 0
    """Bytes written."""
    read_bytes_s: float | None = None
    """Bytes a second over the last two seconds."""
    write_bytes_s: float | None = None
    """Bytes a second over the last two seconds."""
    read_ms: Quantiles = msgspec.field(default_factory=Quantiles)
    """Milliseconds of a read of one shard, of the slowest place."""
    write_ms: Quantiles = msgspec.field(default_factory=Quantiles)
    """Milliseconds of a write of one shard, of the slowest place."""
    queue: int = 0
    """Calls that wait or are under way, all places together."""
    errors_total: int = 0
    """Calls that failed or timed out."""
    corrupt_total: int = 0
    """Shards with a wrong checksum, length or header."""
    evicted_total: int = 0
    """Shards deleted for the quota."""
    declined_total: int = 0
    """Fetches that were not begun, because computing was predicted to be faster."""


class TiersInfo(msgspec.Struct, kw_only=True):
    """The host cache, stores and backends. Slots are host blocks; they add up to `slots`."""

    slots: int = 0
    """Host blocks."""
    slots_swapped: int = 0
    """Hold swapped requests."""
    slots_cached: int = 0
    """Found by their digest."""
    slots_moving: int = 0
    """Written by copies or fetches under way, quarantined ones included."""
    slots_quarantined: int = 0
    """Slots of a fetch whose store has not answered."""
    slot_bytes: int = 0
    """Bytes of one slot on all stages."""
    prompt_tokens_total: int = 0
    """Tokens of all starts; the next three and the backends' hits are parts of it."""
    device_hit_tokens_total: int = 0
    """Tokens found in device blocks."""
    host_hit_tokens_total: int = 0
    """Tokens that starts found in slots that no fetch of the request filled."""
    computed_tokens_total: int = 0
    """Tokens computed."""
    out_bytes_total: int = 0
    """Copied to the host cache."""
    in_bytes_total: int = 0
    """Loaded from the host cache; once for all requests that wait for the same block."""
    evicted_total: int = 0
    """Slots that were reused."""
    dropped_total: int = 0
    """Blocks that were not copied out, and chunks that were not put, for lack of slots or time."""
    finding: int = 0
    """Requests whose chunks are looked for now."""
    fetching: int = 0
    """Requests whose chunks are read now."""
    failed_fetches_total: int = 0
    """Fetches that brought less than was found."""
    ready: bool = False
    """Whether the namespace is known, so that backends are used."""
    why_not_ready: str = ""
    """Reason in one line; empty if it is, or if there is no backend."""
    stores: list[StoreInfo] = []
    """One a place; empty without backends."""
    backends: list[BackendInfo] = []
    """Backends in the order of the profile, then as they were added."""
