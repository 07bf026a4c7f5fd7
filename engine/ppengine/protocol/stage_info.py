"""One place in a snapshot: its process, memory, blocks, streams and the operation that it is in.

Bytes, milliseconds, blocks. Unknown is None, never 0. Scripts rely on it: fields may be added, none may go.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ppengine.protocol.gpu import GpuInfo

StageState = Literal[
    "loading", "idle", "receiving", "gathering", "computing", "sending", "swapping", "resizing",
    "blocked", "starved", "stopped", "dead",
]  # fmt: skip


class DeviceInfo(msgspec.Struct, kw_only=True):
    """Device of a stage."""

    kind: str
    name: str
    uuid: str | None = None


class Waiting(msgspec.Struct, kw_only=True):
    """Wait of a stage: `what` is one of step, receive, send, collective; `stage` None means the core."""

    stage: int | None
    what: str
    since_ms: float
    rank: int | None = None
    """Tensor rank of its own stage whose part of a collective it waits for; null: it waits for no rank."""


class SumRoute(msgspec.Struct, kw_only=True, frozen=True):
    """One way of the sums between ranks. A part takes the first that it fits."""

    most_bytes: int | None
    """Bytes of the largest part that goes this way; null: any."""
    way: str
    """How it goes, in words."""


class SumTime(msgspec.Struct, kw_only=True, frozen=True):
    """A measured sum of all ranks' parts."""

    bytes: int
    """Bytes of a part."""
    us: float
    """Microseconds of a call: the median of several, on cards the mean of several in a row."""
    way: str | None = None
    """How it went: `shared memory`, `one shot`, `two shots`, `copies`; null: not known."""


class SumsInfo(msgspec.Struct, kw_only=True, frozen=True):
    """Sums between the ranks of a stage."""

    routes: list[SumRoute] = []
    """Ways by the size of a part."""
    times: list[SumTime] = []
    """Measured when the ranks met; empty: not known, as where ranks share a card."""


class PlaceLinks(msgspec.Struct, kw_only=True, frozen=True):
    """Links of a place with others, which it knows once it has met them. Each field is one of `StageInfo`, too.

    The record passes as a whole from the stage to the gateway.
    """

    carrier: str | None = None
    sums: SumsInfo | None = None


class StepMs(msgspec.Struct, kw_only=True):
    """Own work of a step on this stage, waits excluded, over the last 10 s (2,048 steps at most); of a GPU, what its
    device did."""

    p50: float | None = None
    p99: float | None = None


class StageMemory(msgspec.Struct, kw_only=True):
    """Bytes. `limit` = total x utilization; `used` = what this process holds on the device."""

    total: int | None = None
    limit: int | None = None
    used: int | None = None
    weights: int | None = None
    kv_mapped: int | None = None
    kv_reserved: int | None = None
    other: int | None = None
    kv_resident: int | None = None
    """CPU stages: Rss of the KV mapping, read from /proc."""


class KvBlocks(msgspec.Struct, kw_only=True):
    """Device blocks. `mapped` is agreed by all stages, `capacity` is what this stage could hold."""

    used: int | None = None
    cached: int | None = None
    free: int | None = None
    mapped: int | None = None
    capacity: int | None = None
    binding: bool = False


class SwapBlocks(msgspec.Struct, kw_only=True):
    """Host blocks of the swap pool."""

    total: int | None = None
    used: int | None = None


class StreamInfo(msgspec.Struct, kw_only=True):
    """One stream (on a CPU stage: one thread that works) and its current operation."""

    name: str
    owner: str
    op: str | None = None
    age_ms: float | None = None
    pending: int | None = None
    waits_for: str | None = None
    on_device: bool = False
    """A stream of a GPU, by what the device itself has written; else a thread that works, by its ring."""
    begun_step: int | None = None
    """The step whose work the device has begun last on it; None: none, or a thread's."""
    done_step: int | None = None
    late_ranks: list[int] = []
    """Ranks of its stage for which it waits in a collective, on a GPU: they have not sent their parts."""


class CordonInfo(msgspec.Struct, kw_only=True):
    """Cordon of a stage: until it is lifted no request begins, and the stage is not restarted automatically."""

    by: str
    since_s: float
    reason: str = ""


class StageInfo(msgspec.Struct, kw_only=True):
    """One stage (one tensor rank of it)."""

    index: int
    tensor_rank: int
    state: StageState
    pid: int | None
    host: str
    layers: list[int]
    device: DeviceInfo
    sample_age_ms: float | None = None
    progress_age_ms: float | None = None
    waiting_on: Waiting | None = None
    inbox: int | None = None
    """Steps received and not begun."""
    outbox: int | None = None
    """Sends handed to the transport and not done."""
    micro_batches: list[int] = []
    retired_step: int | None = None
    """Newest step that this stage has acknowledged to the core."""
    step_ms: StepMs = msgspec.field(default_factory=StepMs)
    idle_fraction: float | None = None
    """Share of the last seconds in which the main loop waited for others; of a GPU, in which it had nothing to do."""
    rank_wait: float | None = None
    """Share of the last second in which it waited for other ranks of its stage; null: it has none, or not known.

    The rank that waits least is the one that comes late."""
    memory: StageMemory = msgspec.field(default_factory=StageMemory)
    kv_blocks: KvBlocks = msgspec.field(default_factory=KvBlocks)
    swap_blocks: SwapBlocks = msgspec.field(default_factory=SwapBlocks)
    streams: list[StreamInfo] = []
    gpu: GpuInfo | None = None
    """The card of `device.uuid`, with its own age; other stages and processes may use it too."""
    op: str | None = None
    """The operation that the main loop is in, as text (`forward m18412`)."""
    timeline: list[list[float]] = []
    """Recent operations of the main loop: [ring.Kind, micro-batch, start in ms ago, length in ms]."""
    carrier: str | None = None
    """Carrier of the hidden states that it receives where no card writes them, `TCP` or `RDMA`; null: not known."""
    cordon: CordonInfo | None = None
    sums: SumsInfo | None = None
    """Sums with the other ranks of its stage; null: it has none, or not known."""
