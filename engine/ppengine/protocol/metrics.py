"""Counters and histograms of the core, for the process that exports them."""

from __future__ import annotations

import msgspec

from ppengine.protocol.clients import ClientCounts


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
    slo_met: int = 0
    """Requests that have ended and met the objectives of the profile; 0 without any."""
    slo_missed: int = 0
    """Those that have not."""
    histograms: dict[str, HistogramCounts] = {}
    """By the names of `core/request_metrics.py`; seconds, or tokens."""
    stages: list[StageMetrics] = []
    http: list[ClientCounts] = []
    """Clients of each HTTP process."""
