"""The metrics of an engine in Prometheus' text format: vLLM's names for its dashboards, and our own.

Names, labels and bucket edges are those of vLLM's published Grafana boards. Edges are written as floats, as
`prometheus_client` does: Prometheus 2 takes `1` and `1.0` for two edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from ppengine.common.config import EngineConfig
from ppengine.common.profile_sections import SloConfig
from ppengine.http.tier_metrics import families
from ppengine.protocol.clients import HTTP_EDGES_S, ClientCounts, ProcessFigures
from ppengine.protocol.metrics import CoreMetrics, HistogramCounts, RingFigures

CONTENT_TYPE = "text/plain; version=0.0.4"
_REASONS = {"stop": "stop", "length": "length", "abort": "abort"}
"""Finish reasons of the core and vLLM's; any other is `error`."""
_HISTOGRAMS = {
    "first_token": ("vllm:time_to_first_token_seconds", "Seconds from arrival to the first token."),
    "between_tokens": ("vllm:inter_token_latency_seconds", "Seconds between two tokens of a request."),
    "whole": ("vllm:e2e_request_latency_seconds", "Seconds from arrival to the end."),
    "prepare": ("ppengine_request_prepare_seconds", "Seconds from arrival to the queue: text, tokens, grammar."),
    "queue": ("vllm:request_queue_time_seconds", "Seconds in the queue until the first blocks."),
    "inference": ("vllm:request_inference_time_seconds", "Seconds from the first blocks to the end."),
    "prefill": ("vllm:request_prefill_time_seconds", "Seconds from the first blocks to the first token."),
    "decode": ("vllm:request_decode_time_seconds", "Seconds from the first token to the end."),
    "per_token": ("vllm:request_time_per_output_token_seconds", "Mean seconds between the tokens of a request."),
    "prompt_tokens": ("vllm:request_prompt_tokens", "Prompt tokens of a request."),
    "output_tokens": ("vllm:request_generation_tokens", "Output tokens of a request."),
    "max_output_tokens": ("vllm:request_max_num_generation_tokens", "Most output tokens of a request."),
    "computed_prompt_tokens": ("vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were computed."),
    "step_tokens": ("vllm:iteration_tokens_total", "Tokens of a step."),
    "lookup": ("vllm:kv_offload_lookup_async_delay_seconds", "Seconds for which a request is looked for in backends."),
    "between_tokens_fine": ("ppengine_inter_token_seconds", "Seconds between two tokens of a request, finer."),
}
"""Name and help by the name of the core's histogram."""
_CALLS = {
    "requests": ("ppengine_http_requests_total", "counter", "Calls, by key and route."),
    "tokens": ("ppengine_http_tokens_total", "counter", "Output tokens, by key and route."),
    "open": ("ppengine_http_open_requests", "gauge", "Answers under way, by key and route."),
    "slow": ("ppengine_http_slow_clients", "gauge", "Those whose client has not read for a second."),
    "refused": ("ppengine_http_refused_total", "counter", "Answers of status 429 or 503."),
    "left": ("ppengine_http_left_total", "counter", "Calls whose client left before the end."),
}
"""Name, type and help by the field of `ClientCounts`."""
_PROCESS = {
    "start_time": ("process_start_time_seconds", "gauge", "Unix time of its start."),
    "cpu_s": ("process_cpu_seconds_total", "counter", "CPU time, user and system."),
    "resident_bytes": ("process_resident_memory_bytes", "gauge", "Resident memory."),
    "open_fds": ("process_open_fds", "gauge", "Open file descriptors."),
    "max_fds": ("process_max_fds", "gauge", "Most file descriptors that it may have."),
}
"""Name, type and help by the field of `ProcessFigures`."""
_RINGS = {
    "idle": ("ppengine_stage_idle_ratio", "Share of time in which a rank waits for other stages: the bubble."),
    "rank_wait": ("ppengine_stage_rank_wait_ratio", "Share of time in which it waits for ranks of its stage."),
    "inbox": ("ppengine_stage_inbox_steps", "Steps that it has received and not begun."),
    "outbox": ("ppengine_stage_outbox_sends", "Sends to the next stage that are not done."),
    "age_s": ("ppengine_stage_sample_age_seconds", "Time since its rings were read."),
}
"""Name and help by the field of `RingFigures`."""
Labels = Mapping[str, str]


def exposition(model: str, config: EngineConfig, metrics: CoreMetrics) -> str:
    """Return the whole text. Its length does not depend on the number of requests."""
    labels = {"model_name": model, "engine": "0"}
    lines = [
        *_vllm(labels, config, metrics),
        *(
            line
            for name, each in metrics.histograms.items()
            if name != "lookup" or metrics.tiers is not None
            for line in _histogram(*_HISTOGRAMS[name], labels, each)
        ),
        *_own({"model_name": model}, metrics),
        *_slo({"model_name": model}, config.profile.slo, metrics),
        *(line for one in families({"model_name": model}, metrics.tiers) for line in _metric(*one)),
        *_rings({"model_name": model}, metrics.rings),
        *_calls(metrics.http),
        *_processes(metrics.processes),
    ]
    return "\n".join(lines) + "\n"


def _vllm(labels: Labels, config: EngineConfig, metrics: CoreMetrics) -> Iterator[str]:
    aside = 0 if metrics.tiers is None else metrics.tiers.finding + metrics.tiers.fetching
    waiting = metrics.waiting + metrics.swapped + aside
    hits, computed, backends = metrics.prefix_hit_tokens, metrics.prompt_tokens, metrics.backend_hit_tokens
    yield from _metric("vllm:num_requests_running", "gauge", "Requests that run.", [(labels, metrics.running)])
    yield from _metric("vllm:num_requests_waiting", "gauge", "Requests that wait.", [(labels, waiting)])
    reasons = [
        ({**labels, "reason": "capacity"}, waiting - aside),
        ({**labels, "reason": "deferred"}, metrics.held + aside),
    ]
    yield from _metric("vllm:num_requests_waiting_by_reason", "gauge", "Requests that wait, by reason.", reasons)
    yield from _metric("vllm:num_requests_swapped", "gauge", "Requests on the host.", [(labels, metrics.swapped)])
    share = metrics.blocks_used / metrics.blocks if metrics.blocks else 0.0
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
        yield from _metric(name, "gauge", "Share of the KV blocks in use, 0 to 1.", [(labels, share)])
    host = metrics.host_blocks_used / metrics.host_blocks if metrics.host_blocks else 0.0
    yield from _metric("vllm:cpu_cache_usage_perc", "gauge", "Share of the host blocks in use.", [(labels, host)])
    counters = {
        "vllm:prompt_tokens_total": ("Prompt tokens, cached ones too.", computed + hits),
        "vllm:generation_tokens_total": ("Output tokens.", metrics.output_tokens),
        "vllm:num_preemptions_total": ("Preemptions.", metrics.preemptions),
        "vllm:prefix_cache_queries_total": ("Prompt tokens that were looked up.", computed + hits),
        "vllm:prefix_cache_hits_total": ("Those that were cached on device or host.", hits - backends),
        "vllm:prompt_tokens_cached_total": ("Prompt tokens that were cached.", hits),
    }
    for name, (text, value) in counters.items():
        yield from _metric(name, "counter", text, [(labels, value)])
    cached = metrics.host_hit_tokens
    tiers = {"device": hits - cached - backends, "host": cached, "disk": 0, "external_unspecified": backends}
    held = [({**labels, "source": source}, value) for source, value in tiers.items()]
    name = "vllm:prompt_tokens_cached_by_source_total"
    yield from _metric(name, "counter", "Prompt tokens that were cached, by source.", held)
    sources = {"local_compute": computed, "local_cache_hit": hits - backends, "external_kv_transfer": backends}
    by_source = [({**labels, "source": source}, value) for source, value in sources.items()]
    yield from _metric("vllm:prompt_tokens_by_source_total", "counter", "Prompt tokens, by source.", by_source)
    ends = dict.fromkeys(("stop", "length", "abort", "error"), 0)
    for reason, count in metrics.finished.items():
        ends[_REASONS.get(reason, "error")] += count
    by_reason = [({**labels, "finished_reason": reason}, count) for reason, count in ends.items()]
    yield from _metric("vllm:request_success_total", "counter", "Requests that ended, by reason.", by_reason)
    profile = config.profile
    info = {
        **labels, "num_gpu_blocks": str(metrics.blocks), "num_cpu_blocks": str(metrics.host_blocks),
        "block_size": str(profile.memory.block_size), "cache_dtype": profile.model.dtype,
        "gpu_memory_utilization": f"{metrics.memory_utilization:g}",
        "enable_prefix_caching": str(profile.scheduler.prefix_caching), "prefix_caching_hash_algo": "blake2b",
        "kv_offloading_backend": "swap" if metrics.host_blocks else "None",
        "kv_offloading_size": f"{profile.memory.swap_space_gib:g}",
    }  # fmt: skip
    yield from _metric("vllm:cache_config_info", "gauge", "The KV cache, in labels.", [(info, 1)])
    # The engine has no mode of sleep.
    awake = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    states = [({**labels, "sleep_state": state}, value) for state, value in awake.items()]
    yield from _metric("vllm:engine_sleep_state", "gauge", "Whether the engine sleeps: it never does.", states)
    yield from _offload(labels, metrics)


def _offload(labels: Labels, metrics: CoreMetrics) -> Iterator[str]:
    """Yield swaps and copies of the host cache by the names of vLLM's offloading, once the stages serve."""
    swaps = {"store": ("to the host", metrics.swap_out), "load": ("to the device", metrics.swap_in)}
    for verb, (where, copies) in swaps.items():
        if copies is None:
            continue
        head = f"vllm:kv_offload_{verb}"
        yield from _metric(f"{head}_bytes_total", "counter", f"Bytes of KV copied {where}.", [(labels, copies.bytes)])
        yield from _metric(f"{head}_time_total", "counter", f"Seconds of copies {where}.", [(labels, copies.seconds)])
        size = f"{head}_size"
        yield f"# HELP {size} Bytes of KV of a request, or of a step with the host cache, copied {where}."
        yield f"# TYPE {size} summary"
        yield f"{size}_sum{_labels(labels)} {float(copies.bytes)!r}"
        yield f"{size}_count{_labels(labels)} {float(copies.requests)!r}"


def _own(labels: Labels, metrics: CoreMetrics) -> Iterator[str]:
    states = [({**labels, "state": metrics.state}, 1)]
    yield from _metric("ppengine_state_info", "gauge", "State of the engine, in a label.", states)
    yield from _metric("ppengine_step", "gauge", "Newest step.", [(labels, metrics.step)])
    yield from _metric("ppengine_generation", "gauge", "Restarts of stages.", [(labels, metrics.generation)])
    yield from _metric("ppengine_requests_held", "gauge", "Requests on hold.", [(labels, metrics.held)])
    yield from _metric("ppengine_swaps_total", "counter", "Swaps of requests.", [(labels, metrics.swaps)])
    constrained = {"running": metrics.constrained - metrics.constrained_waiting, "mask": metrics.constrained_waiting}
    states = [({**labels, "state": state}, count) for state, count in constrained.items()]
    text = "Live requests with structured output: not waiting for a mask, and waiting."
    yield from _metric("ppengine_requests_structured", "gauge", text, states)
    text = "Requests with structured output that ended."
    yield from _metric("ppengine_structured_requests_total", "counter", text, [(labels, metrics.constrained_ended)])
    utilization = [(labels, metrics.memory_utilization)]
    yield from _metric("ppengine_memory_utilization", "gauge", "Memory utilization.", utilization)
    ranks = [({**labels, "stage": str(one.stage), "rank": str(one.rank)}, one) for one in metrics.stages]
    up = [(where, int(one.up)) for where, one in ranks]
    yield from _metric("ppengine_stage_up", "gauge", "Whether the rank of a stage serves.", up)
    retired = [(where, one.retired_step) for where, one in ranks]
    yield from _metric("ppengine_stage_retired_step", "gauge", "Newest step that it has acknowledged.", retired)
    oldest = [(where, one.oldest_step_s) for where, one in ranks]
    yield from _metric("ppengine_stage_oldest_step_seconds", "gauge", "Age of its oldest step in flight.", oldest)


def _slo(labels: Labels, slo: SloConfig, metrics: CoreMetrics) -> Iterator[str]:
    """Yield the objectives of the profile and the requests that met them; nothing without an objective."""
    if not slo.set:
        return
    targets = {"ttft": slo.ttft_ms, "itl": slo.itl_ms}
    seconds = [({**labels, "figure": name}, value / 1e3) for name, value in targets.items() if value is not None]
    yield from _metric("ppengine_slo_target_seconds", "gauge", "Objectives of the profile.", seconds)
    results = [({**labels, "result": "met"}, metrics.slo_met), ({**labels, "result": "missed"}, metrics.slo_missed)]
    text = "Requests that ended, by whether they met the objectives; no aborted ones."
    yield from _metric("ppengine_slo_requests_total", "counter", text, results)


def _calls(clients: list[ClientCounts]) -> Iterator[str]:
    """Yield the calls of the HTTP port, summed over its processes."""
    by_status, by_client = Counter[tuple[str, str]](), Counter[tuple[str, str, str]]()
    for one in clients:
        errors, failures = one.errors + one.refused, one.failed
        good = one.requests - one.open - errors - failures
        by_status.update({(one.route, "2xx"): good, (one.route, "4xx"): errors, (one.route, "5xx"): failures})
        for name in _CALLS:
            by_client[name, one.key, one.route] += getattr(one, name)
    samples = [({"handler": route, "status": status}, count) for (route, status), count in by_status.items()]
    yield from _metric("http_requests_total", "counter", "Calls that ended, by path and class of status.", samples)
    yield from _durations(clients)
    for field, (name, kind, text) in _CALLS.items():
        found = [
            ({"key": key, "route": route}, count) for (which, key, route), count in by_client.items() if which == field
        ]
        yield from _metric(name, kind, text, found)


def _durations(clients: list[ClientCounts]) -> Iterator[str]:
    """Yield the durations of calls by path, over processes and keys."""
    head, text = "http_request_duration_seconds", "Seconds from a call to the end of its answer, by path."
    for number, route in enumerate(sorted({one.route for one in clients if one.took})):
        parts = [one for one in clients if one.route == route and one.took]
        counts = [sum(column) for column in zip(*(one.took for one in parts), strict=True)]
        whole = HistogramCounts(list(HTTP_EDGES_S), counts, sum(one.took_s for one in parts))
        # A family has one head, in front of all its series.
        yield from list(_histogram(head, text, {"handler": route}, whole))[2 if number else 0 :]


def _processes(processes: Mapping[str, ProcessFigures]) -> Iterator[str]:
    """Yield the HTTP processes, as `prometheus_client` describes one, by role."""
    for field, (name, kind, text) in _PROCESS.items():
        samples = [({"role": role}, getattr(one, field)) for role, one in processes.items()]
        yield from _metric(name, kind, f"{text} By HTTP process.", samples)


def _rings(labels: Labels, rings: list[RingFigures]) -> Iterator[str]:
    """Yield the figures of the stages' rings; one that is not known has no sample."""
    ranks = [({**labels, "stage": str(one.stage), "rank": str(one.rank)}, one) for one in rings]
    steps = [
        ({**where, "quantile": quantile}, value)
        for where, one in ranks
        for quantile, value in (("0.5", one.step_p50_s), ("0.99", one.step_p99_s))
        if value is not None
    ]
    text = "Own work of a step, waits excluded, over the last 10 s."
    yield from _metric("ppengine_stage_step_seconds", "gauge", text, steps)
    for field, (name, text) in _RINGS.items():
        known = [(where, value) for where, one in ranks if (value := getattr(one, field)) is not None]
        yield from _metric(name, "gauge", text, known)


def _metric(name: str, kind: str, text: str, samples: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    # The name of a counter's family ends before `_total` in OpenMetrics alone.
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield f"{name}{_labels(labels)} {float(value)!r}"


def _histogram(name: str, text: str, labels: Labels, counts: HistogramCounts) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} histogram"
    edges = [*(repr(float(edge)) for edge in counts.edges), "+Inf"]
    sums = list(accumulate(counts.counts))
    for edge, count in zip(edges, sums, strict=True):
        yield f"{name}_bucket{_labels({**labels, 'le': edge})} {float(count)!r}"
    yield f"{name}_sum{_labels(labels)} {counts.sum!r}"
    yield f"{name}_count{_labels(labels)} {float(sums[-1])!r}"


def _labels(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
