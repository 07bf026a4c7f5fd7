"""Metrics of KV tiers: vLLM's names where it has the same figure, `ppengine_tier_*` for all.

vLLM's are of `vllm/v1/metrics/loggers.py` (external prefix cache) and `vllm/v1/kv_offload/tiering` (secondary tiers).
Backends are external here; the host's slots are a part of the engine's own cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ppengine.protocol.tiers import BackendInfo, TiersInfo

Labels = Mapping[str, str]


class Family(NamedTuple):
    """One metric with its samples."""

    name: str
    kind: str
    text: str
    samples: Iterable[tuple[Labels, float]]


def families(labels: Labels, tiers: TiersInfo | None) -> Iterator[Family]:
    """Yield the metrics of tiers; nothing without them. A figure that is not known has no sample."""
    if tiers is None:
        return
    yield from _vllm({**labels, "engine": "0"}, tiers)
    slots = {
        "swapped": tiers.slots_swapped, "cached": tiers.slots_cached, "moving": tiers.slots_moving,
        "quarantined": tiers.slots_quarantined,
        "free": max(0, tiers.slots - tiers.slots_swapped - tiers.slots_cached - tiers.slots_moving),
    }  # fmt: skip
    text = "Slots of the host, by use; quarantined ones are moving, too."
    yield Family("ppengine_tier_slots", "gauge", text, _by(labels, "use", slots))
    hits = {
        "device": tiers.device_hit_tokens_total, "host": tiers.host_hit_tokens_total,
        **{backend.name: backend.hit_tokens_total for backend in tiers.backends},
        "computed": tiers.computed_tokens_total,
    }  # fmt: skip
    text = "Tokens of all starts, by the tier that had them."
    yield Family("ppengine_tier_tokens_total", "counter", text, _by(labels, "tier", hits))
    used: dict[str, float | None] = {
        "host": tiers.slot_bytes * (tiers.slots - slots["free"]),
        **{backend.name: backend.used_bytes for backend in tiers.backends},
    }
    yield Family("ppengine_tier_used_bytes", "gauge", "Bytes in use.", _by(labels, "tier", used))
    sizes = {"host": tiers.slots * tiers.slot_bytes, **{each.name: each.quota_bytes for each in tiers.backends}}
    yield Family("ppengine_tier_size_bytes", "gauge", "Most bytes.", _by(labels, "tier", sizes))
    moved = [
        ({**labels, "tier": tier, "direction": direction}, float(count))
        for tier, counts in (
            ("host", (tiers.in_bytes_total, tiers.out_bytes_total)),
            *((each.name, (each.read_bytes_total, each.written_bytes_total)) for each in tiers.backends),
        )
        for direction, count in zip(("in", "out"), counts, strict=True)
    ]
    text = "Bytes towards the device (in) and away from it (out)."
    yield Family("ppengine_tier_bytes_total", "counter", text, moved)
    yield from _requests(labels, tiers)
    yield from _backends(labels, tiers.backends)
    for name, figure, text in (
        ("ppengine_tier_store_age_seconds", "age_ms", "Age of the newest figures of a store."),
        ("ppengine_tier_store_lag_seconds", "lag_ms", "Age of the oldest job that a store owes; 0 without one."),
    ):
        known = [
            ({**labels, "stage": str(store.stage), "rank": str(store.rank)}, (getattr(store, figure) or 0.0) / 1e3)
            for store in tiers.stores
            if store.age_ms is not None
        ]
        yield Family(name, "gauge", text, known)


def _vllm(labels: Labels, tiers: TiersInfo) -> Iterator[Family]:
    """Yield the figures that vLLM's boards have for external caches and secondary tiers."""
    looked = tiers.prompt_tokens_total - tiers.device_hit_tokens_total - tiers.host_hit_tokens_total
    hits = looked - tiers.computed_tokens_total  # Tokens of backends that were removed are among them.
    text = "Prompt tokens that were neither on the device nor on the host."
    yield Family("vllm:external_prefix_cache_queries_total", "counter", text, [(labels, looked)])
    text = "Those that were found in a backend."
    yield Family("vllm:external_prefix_cache_hits_total", "counter", text, [(labels, hits)])
    stages = {"waiting_to_start": tiers.finding, "in_progress": tiers.fetching}
    text = "Requests that wait for backends: looked for, and read."
    yield Family("vllm:num_requests_kv_fetch_by_stage", "gauge", text, _by(labels, "stage", stages))
    share = tiers.slots_moving / tiers.slots if tiers.slots else 0.0
    text = "Share of the slots of the host that copies and fetches write."
    yield Family("vllm:kv_offload_cpu_cache_write_usage_perc", "gauge", text, [(labels, share)])
    text = "Blocks and chunks that were not kept, for lack of slots or time."
    yield Family("vllm:kv_offload_allocation_failure_total", "counter", text, [(labels, tiers.dropped_total)])
    read = {backend.name: backend.read_bytes_total for backend in tiers.backends}
    written = {backend.name: backend.written_bytes_total for backend in tiers.backends}
    head = "vllm:kv_offload_tiering"
    yield Family(f"{head}_read_bytes_total", "counter", "Bytes read from backends.", _by(labels, "tier", read))
    yield Family(f"{head}_write_bytes_total", "counter", "Bytes written to backends.", _by(labels, "tier", written))


def _requests(labels: Labels, tiers: TiersInfo) -> Iterator[Family]:
    """Yield the requests that wait for chunks, and the events of the host cache."""
    waiting = {"finding": tiers.finding, "fetching": tiers.fetching}
    text = "Requests that wait for backends, by state."
    yield Family("ppengine_tier_requests", "gauge", text, _by(labels, "state", waiting))
    for name, text, count in (
        ("short_fetches", "Fetches that brought less than was found.", tiers.failed_fetches_total),
        ("host_evictions", "Slots of the host that were used again.", tiers.evicted_total),
        ("dropped", "Blocks and chunks that were not kept, for lack of slots or time.", tiers.dropped_total),
    ):
        yield Family(f"ppengine_tier_{name}_total", "counter", text, [(labels, count)])
    yield Family("ppengine_tier_ready", "gauge", "Whether backends are used.", [(labels, int(tiers.ready))])


def _backends(labels: Labels, backends: list[BackendInfo]) -> Iterator[Family]:
    """Yield the state, troubles and latencies of backends."""
    states = [
        ({**labels, "tier": each.name, "state": each.state, "breaker": each.breaker,
          "write_breaker": each.write_breaker}, 1.0)
        for each in backends
    ]  # fmt: skip
    text = "State of a backend and its breakers of reads and of writes, in labels."
    yield Family("ppengine_tier_backend_info", "gauge", text, states)
    for name, kind, text, figure in (
        ("queue", "gauge", "Calls of a backend that wait or are under way.", "queue"),
        ("errors_total", "counter", "Calls that failed or timed out.", "errors_total"),
        ("corrupt_total", "counter", "Shards with a wrong checksum, length or header.", "corrupt_total"),
        ("evictions_total", "counter", "Shards deleted for the quota.", "evicted_total"),
        ("declined_total", "counter", "Fetches not begun, as computing was faster.", "declined_total"),
    ):
        counts = {each.name: getattr(each, figure) for each in backends}
        yield Family(f"ppengine_tier_backend_{name}", kind, text, _by(labels, "tier", counts))
    calls = [
        ({**labels, "tier": each.name, "call": call, "quantile": quantile}, value / 1e3)
        for each in backends
        for call, found in (("read", each.read_ms), ("write", each.write_ms))
        for quantile, value in (("0.5", found.p50), ("0.99", found.p99))
        if value is not None
    ]
    text = "A call for one shard at the slowest place, of the last minute."
    yield Family("ppengine_tier_backend_seconds", "gauge", text, calls)


def _by(labels: Labels, name: str, values: Mapping[str, float | None]) -> list[tuple[Labels, float]]:
    """Return a sample for each value that is known, with its key as the label `name`."""
    return [({**labels, name: key}, value) for key, value in values.items() if value is not None]
