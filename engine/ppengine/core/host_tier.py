"""The host cache in a report."""

from __future__ import annotations

from ppengine.core.serving import Serving
from ppengine.protocol.tiers import TiersInfo


def host_tier(serving: Serving) -> TiersInfo | None:
    """Return the figures of the host cache, None without one; stores and backends are left out."""
    scheduler = serving.scheduler
    copies, host = scheduler.blocks.copies, scheduler.blocks.host
    if copies is None:
        return None
    cache, totals, queues = copies.cache, copies.totals, scheduler.queues.counts()
    slot_bytes = serving.memory.capacity.block_bytes
    return TiersInfo(
        slots=host.size,
        slots_swapped=host.used,
        slots_cached=cache.cached,
        slots_moving=cache.moving,
        slots_quarantined=cache.quarantined,
        slot_bytes=slot_bytes,
        prompt_tokens_total=totals.prompt,
        device_hit_tokens_total=totals.device,
        host_hit_tokens_total=totals.host,
        computed_tokens_total=totals.computed,
        out_bytes_total=copies.out_total * slot_bytes,
        in_bytes_total=copies.in_total * slot_bytes,
        evicted_total=cache.evicted_total,
        dropped_total=copies.dropped_total,
        finding=queues.finding,
        fetching=queues.fetching,
    )
