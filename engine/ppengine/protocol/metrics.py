"""Counters and histograms of the core, for the process that exports them."""

from __future__ import annotations

import msgspec

from ppengine.protocol.clients import ClientCounts, ProcessFigures
from ppengine.protocol.tiers import TiersInfo


class HistogramCounts(msgspec.Struct, array_like=True):
    """A histogram since the start of the core: `counts` has one entry more than `edges`, for all above the last."""

    edges: list[float]
    counts: list[int]
    sum: float


class StageMetrics(msgspec.Struct, kw_only=True):
    """One rank of a stage."""

    stage: int
    rank: int
    up: bool
    """Whether it serves."""
    retired_step: int
    oldest_step_s: float
    """Seconds since the oldest step was sent that it has not acknowledged; 0 without one."""


class RingFigures(msgspec.Struct, array_like=True):
    """One rank of a stage by its rings; null: not known."""

    stage: int
    rank: int
    step_p50_s: float | None
    """Own work of a step, waits excluded, over the last 10 s."""
    step_p99_s: float | None
    idle: float | None
    """Share of the last seconds in which it waited for other stages: the bubble of the pipeline."""
    rank_wait: float | None
    """Share of the last second in which it waited for other ranks."""
    inbox: int | None
    """Steps received and not begun."""
    outbox: int | None
    """Sends that are not done: a slow edge."""
    age_s: float | None
    """Seconds since the rings were read."""


class StageFigures(msgspec.Struct, tag="stage-figures", kw_only=True):
    """Figures of the rings, each second from the gateway if there is an HTTP port. No answer."""

    ranks: list[RingFigures]


class SwapFigures(msgspec.Struct, array_like=True):
    """Copies of blocks between device and host in one direction, since the start of the core."""

    requests: int
    """Requests that were swapped, and steps that copied blocks of the host cache."""
    bytes: int
    """In all stages."""
    seconds: float
    """From the step that copies to its end, added up."""


class MetricsQuery(msgspec.Struct, tag="metrics-query", kw_only=True):
    """Answered by `CoreMetrics` at once."""

    nonce: int


class CoreMetrics(msgspec.Struct, tag="core-metrics", kw_only=True):
    """The counts of the core. Totals begin again with another core, tokens apart."""

    nonce: int
    state: str
    running: int = 0
    waiting: int = 0
    swapped: int = 0
    held: int = 0
    blocks: int = 0
    """KV blocks that requests may have."""
    blocks_used: int = 0
    host_blocks: int = 0
    host_blocks_used: int = 0
    step: int = 0
    generation: int = 0
    memory_utilization: float = 0.0
    prompt_tokens: int = 0
    """Prompt tokens that were computed; a recompute counts again."""
    prefix_hit_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    finished: dict[str, int] = {}
    """Requests that have ended, by finish reason."""
    host_hit_tokens: int = 0
    """Those of the cached prompt tokens that came from the host cache."""
    backend_hit_tokens: int = 0
    """Those that came from backends of its store."""
    swap_out: SwapFigures | None = None
    """Copies to the host; None until the stages serve."""
    swap_in: SwapFigures | None = None
    """Copies back to the device."""
    constrained: int = 0
    """Live requests whose output follows a grammar."""
    constrained_waiting: int = 0
    """Those of them whose next token waits for its mask."""
    constrained_ended: int = 0
    """Those that have ended."""
    slo_met: int = 0
    """Requests that have ended and met the objectives of the profile; 0 without any."""
    slo_missed: int = 0
    """Those that have not."""
    tiers: TiersInfo | None = None
    """KV tiers as of the core's newest report; None without them."""
    histograms: dict[str, HistogramCounts] = {}
    """By the names of `core/request_metrics.py`; seconds, or tokens."""
    stages: list[StageMetrics] = []
    http: list[ClientCounts] = []
    """Clients of each HTTP process."""
    processes: dict[str, ProcessFigures] = {}
    """HTTP processes by role."""
    rings: list[RingFigures] = []
    """Empty without a report of the gateway in the last seconds."""
