"""Telemetry inside the engine: core, agent and supervisor to the gateway (PUSH -> PULL, bounded, dropped when full)."""

from __future__ import annotations

import msgspec

from ppengine.protocol.snapshot import (
    EngineInfo,
    Event,
    OperationInfo,
    Queues,
    RequestInfo,
    StreamInfo,
    Throughput,
    Waiting,
)


class StageView(msgspec.Struct, kw_only=True):
    """What the core knows of one stage."""

    index: int
    rank: int
    ready: bool
    retired_step: int
    """Newest step that this stage has acknowledged."""
    oldest_unretired_age_ms: float | None
    oldest_unretired_tokens: int = 0
    """Tokens of that step: expected time scales with work."""
    capacity: int | None = None
    mapped: int | None = None
    binding: bool = False
    layers: list[int] = []
    total_bytes: int | None = None
    weights_bytes: int | None = None
    peak_bytes: int | None = None
    block_bytes: int | None = None
    swap_blocks: int | None = None
    pid: int | None = None
    host: str = ""
    device_kind: str = "cpu"
    device_name: str = ""
    device_uuid: str | None = None
    progress: str = ""
    """Loading line of a stage that is not ready."""


class CoreReport(msgspec.Struct, tag="core", kw_only=True):
    """The scheduler's side, `publish_hz` times a second."""

    mono_ns: int
    engine: EngineInfo
    stages: list[StageView]
    queues: Queues
    requests_total: int
    requests: list[RequestInfo]
    operations: list[OperationInfo]
    throughput: Throughput
    kv_used: int | None
    kv_cached: int | None
    kv_free: int | None
    swap_used: int | None
    steps_in_flight: list[int]
    preemptions_total: int
    prefix_hit_tokens_total: int
    dropped_total: int = 0


class StageSample(msgspec.Struct, kw_only=True):
    """One stage process as seen from outside: its rings, /proc, cgroup."""

    index: int
    rank: int
    pid: int
    process_state: str | None
    """State letter of /proc/<pid>/stat (R, S, D, T, Z, ...); None: no such process."""
    process_start: int | None
    phase: str
    phase_age_ms: float
    progress_age_ms: float | None
    """Age of the newest record or main-loop tick."""
    tick_age_ms: float | None
    """Age of the 10 Hz tick of the control thread."""
    op: str | None
    """Kind of the open operation of the main thread (receive, forward, send, sample, ...), None between two."""
    op_age_ms: float | None
    op_step: int | None
    op_peer: int | None
    waiting_on: Waiting | None
    inbox: int | None
    outbox: int | None
    begun_step: int | None
    finished_step: int | None
    micro_batches: list[int]
    step_ms_p50: float | None
    step_ms_p99: float | None
    idle_fraction: float | None
    gauges: dict[str, int]
    """Byte and block gauges of the ring header, by name."""
    kv_resident: int | None
    streams: list[StreamInfo]
    timeline: list[list[float]]
    oom_kills: int | None = None
    """`oom_kill` of the process's cgroup memory.events."""
    cpu_s: float | None = None
    forward_ms: list[tuple[int, float]] = []
    """Own history: the longest of the recent forwards of up to so many tokens, as (tokens, ms), rising."""


class AgentReport(msgspec.Struct, tag="agent", kw_only=True):
    """All stages of one node, five times a second."""

    mono_ns: int
    node: str
    stages: list[StageSample]
    core_state: str | None = None
    """Process state letter of the engine core, where it runs on this node and the agent knows its pid."""
    dropped: int = 0
    """Reports of this agent that were dropped because the queue was full."""


class ProcessInfo(msgspec.Struct, kw_only=True):
    """One process of the engine, from its parent. `exit_code`: negative is a signal, None: runs."""

    role: str
    stage: int | None
    rank: int | None
    pid: int
    exit_code: int | None = None
    detail: str = ""
    generation: int = 1
    """Of a stage: the one that this process was started for."""
    replaced: bool = False
    """Its parent ends it now and starts another in its place: its end is no fault."""


class StartStage(msgspec.Struct, tag="start-stage", kw_only=True):
    """From the core to the supervisor: end what is left of this stage's process and start it for `generation`."""

    stage: int
    generation: int


class ProcessReport(msgspec.Struct, tag="processes", kw_only=True):
    """From the supervisor at every change: it alone has the exit statuses."""

    mono_ns: int
    processes: list[ProcessInfo]


class Happened(msgspec.Struct, tag="happened", kw_only=True):
    """An event for the gateway to number and publish (`seq` is 0 here)."""

    event: Event


ToCollector = CoreReport | AgentReport | ProcessReport | Happened
