"""The text of `/metrics`: names, labels and edges that published dashboards query."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import yaml
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import ModelConfig, SloConfig
from ppengine.core.request_metrics import BucketCounts, RequestMetrics, length_edges
from ppengine.http.metrics_text import exposition
from ppengine.protocol.clients import HTTP_EDGES_S, ClientCounts, ProcessFigures
from ppengine.protocol.metrics import CoreMetrics, RingFigures, StageMetrics, SwapFigures
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.tiers import BackendInfo, StoreInfo, TiersInfo

BOARD = [
    "e2e_request_latency_seconds",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_time_per_output_token_seconds",
    "iteration_tokens_total",
    "request_prefill_kv_computed_tokens",
]
"""Histograms of vLLM's boards."""
PLAIN = [
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "num_preemptions_total",
    "prefix_cache_hits_total",
    "prefix_cache_queries_total",
    "prompt_tokens_by_source_total",
    "num_requests_waiting_by_reason",
    "cache_config_info",
    "prompt_tokens_cached_total",
    "prompt_tokens_cached_by_source_total",
    "engine_sleep_state",
    "kv_offload_load_bytes_total",
    "kv_offload_load_size_count",
    "kv_offload_load_size_sum",
    "kv_offload_load_time_total",
    "kv_offload_store_bytes_total",
    "kv_offload_store_size_count",
    "kv_offload_store_size_sum",
    "kv_offload_store_time_total",
]
"""Counters, gauges and sums of vLLM's boards."""
SLO_EDGES = {
    "time_to_first_token_seconds": ["0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"],
    "request_time_per_output_token_seconds": ["0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"],
}
"""Edges that the tiles of objectives select by their text."""
VALUES = {
    "request_success_total": ("finished_reason", ["error"]),
    "num_requests_waiting_by_reason": ("reason", ["capacity", "deferred"]),
    "prompt_tokens_by_source_total": ("source", ["local_compute", "local_cache_hit", "external_kv_transfer"]),
    "engine_sleep_state": ("sleep_state", ["awake", "discard_all"]),
}
"""Values of labels that queries select, by metric."""
SAMPLE = re.compile(r'[a-z_:][a-z0-9_:]*(\{([a-z_]+="([^"\\\n]|\\[\\"n])*",?)*\})? [-+.e0-9]+(inf|nan)?')


def took(ended: int) -> list[int]:
    """Calls of less than 0.1 s, and one above all edges."""
    return [ended, *[0] * (len(HTTP_EDGES_S) - 1), 1]


def text(model: str = "m", slo: SloConfig | None = None, tiers: TiersInfo | None = None) -> str:
    metrics = RequestMetrics(1024)
    for seconds in (0.004, 0.1, 0.1000001, 9999.0):
        metrics.add("first_token", seconds)
    answer = CoreMetrics(
        nonce=1, state="serving", tiers=tiers, blocks=10, blocks_used=4, prefix_hit_tokens=5, prompt_tokens=15,
        finished={"stop": 2, "lost": 1}, slo_met=7, slo_missed=2,
        stages=[StageMetrics(stage=1, rank=0, up=True, retired_step=7, oldest_step_s=0.5)],
        http=[
            ClientCounts("ann", "/v1/completions", 1, 0, 9, 50, 2, 1, 1, 3, {}, {}, took(3), 1.5),
            ClientCounts("ann", "/v1/completions", 0, 0, 1, 5, 0, 0, 0, 0, {}, {}, took(1), 0.5),
            ClientCounts("bob", "/tokenize", 0, 0, 1, 0, 0, 0, 0, 0, {}, {}, took(1), 0.25),
        ],
        processes={role: ProcessFigures(1.7e9, 2.5, 1024, 9, 64) for role in ("http0", "http1")},
        host_hit_tokens=2, backend_hit_tokens=1,
        swap_out=SwapFigures(3, 4096, 0.5), swap_in=SwapFigures(2, 2048, 0.25), constrained=3, constrained_waiting=1,
        constrained_ended=9,
        rings=[RingFigures(0, 0, 0.002, 0.004, 0.25, None, 1, 0, 0.3), RingFigures(1, 0, *[None] * 7)],
        histograms={name: each.wire() for name, each in metrics.histograms.items()},
    )  # fmt: skip
    config = EngineConfig(
        id="abcdef", name="m", epoch="e", model_path="/m",
        profile=Profile(name="m", model=ModelConfig(path="/m"), slo=slo or SloConfig()),
        model_type="llama", layers=[(0, 1), (1, 2)], max_model_len=1024, run_dir="/r", ring_dir="/d", started_wall=0.0,
    )  # fmt: skip
    return exposition(model, config, answer)


def test_every_line_is_a_comment_or_a_sample_and_no_name_has_two_types() -> None:
    lines = text('a "model"\\ with\nall').splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    for line in lines:
        assert line.startswith(("# HELP ", "# TYPE ")) or SAMPLE.fullmatch(line), line


@pytest.mark.parametrize("name", BOARD)
def test_histograms_of_the_boards_are_there(name: str) -> None:
    lines = text().splitlines()
    assert f"# TYPE vllm:{name} histogram" in lines
    for part in ("bucket", "sum", "count"):
        assert any(line.startswith(f'vllm:{name}_{part}{{model_name="m",engine="0"') for line in lines), part


@pytest.mark.parametrize("name", PLAIN)
def test_counters_and_gauges_of_the_boards_are_there(name: str) -> None:
    assert any(line.startswith(f'vllm:{name}{{model_name="m",engine="0"') for line in text().splitlines())


def test_edges_and_values_that_queries_select_are_there_by_their_text() -> None:
    lines = text().splitlines()
    for name, edges in SLO_EDGES.items():
        for edge in edges:
            assert any(line.startswith(f"vllm:{name}_bucket") and f'le="{edge}"' in line for line in lines), (
                name,
                edge,
            )
    for name, (label, values) in VALUES.items():
        for value in values:
            assert any(line.startswith(f"vllm:{name}{{") and f'{label}="{value}"' in line for line in lines), value


def test_swaps_and_structured_outputs_are_counted() -> None:
    lines = text().splitlines()
    where = '{model_name="m",engine="0"}'
    for name, value in (("store_bytes_total", 4096), ("store_size_count", 3), ("load_time_total", 0.25)):
        assert f"vllm:kv_offload_{name}{where} {float(value)!r}" in lines
    assert lines.count("# TYPE vllm:kv_offload_load_size summary") == 1
    for state, count in (("running", 2), ("mask", 1)):
        assert f'ppengine_requests_structured{{model_name="m",state="{state}"}} {count}.0' in lines
    assert 'ppengine_structured_requests_total{model_name="m"} 9.0' in lines


def test_edges_are_floats_and_counts_grow_to_the_total() -> None:
    found = re.findall(r'vllm:time_to_first_token_seconds_bucket\{.*le="([^"]+)"\} (\S+)', text())
    assert [edge for edge, _ in found][7:13] == ["0.1", "0.25", "0.5", "0.75", "1.0", "2.5"]
    counts = dict(found)
    assert (counts["0.005"], counts["0.1"], counts["0.25"], counts["2560.0"], counts["+Inf"]) == (
        "1.0", "2.0", "3.0", "3.0", "4.0",
    )  # fmt: skip
    assert 'vllm:time_to_first_token_seconds_count{model_name="m",engine="0"} 4.0' in text()


def test_objectives_are_counted_if_the_profile_has_any() -> None:
    assert "ppengine_slo" not in text()
    found = [line for line in text(slo=SloConfig(itl_ms=25)).splitlines() if line.startswith("ppengine_slo")]
    assert found == [
        'ppengine_slo_target_seconds{model_name="m",figure="itl"} 0.025',
        'ppengine_slo_requests_total{model_name="m",result="met"} 7.0',
        'ppengine_slo_requests_total{model_name="m",result="missed"} 2.0',
    ]


def test_values_are_those_of_the_core() -> None:
    lines = text().splitlines()
    assert 'vllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.4' in lines
    assert 'vllm:prompt_tokens_total{model_name="m",engine="0"} 20.0' in lines
    for source, count in (("device", 2), ("host", 2), ("external_unspecified", 1)):
        name = "vllm:prompt_tokens_cached_by_source_total"
        assert f'{name}{{model_name="m",engine="0",source="{source}"}} {count}.0' in lines
    assert 'vllm:prompt_tokens_by_source_total{model_name="m",engine="0",source="local_cache_hit"} 4.0' in lines
    assert 'vllm:request_success_total{model_name="m",engine="0",finished_reason="error"} 1.0' in lines
    assert 'ppengine_stage_retired_step{model_name="m",stage="1",rank="0"} 7.0' in lines


def test_calls_are_summed_over_the_processes() -> None:
    lines = text().splitlines()
    assert 'http_requests_total{handler="/v1/completions",status="2xx"} 5.0' in lines
    assert 'http_requests_total{handler="/v1/completions",status="4xx"} 3.0' in lines
    assert 'ppengine_http_tokens_total{key="ann",route="/v1/completions"} 55.0' in lines


def test_durations_of_calls_are_one_family_with_a_series_a_path() -> None:
    lines = text().splitlines()
    assert lines.count("# TYPE http_request_duration_seconds histogram") == 1
    for path, low, total, seconds in (("/v1/completions", 4, 6, 2.0), ("/tokenize", 1, 2, 0.25)):
        where = f'handler="{path}"'
        assert f'http_request_duration_seconds_bucket{{{where},le="0.1"}} {low}.0' in lines
        assert f'http_request_duration_seconds_bucket{{{where},le="+Inf"}} {total}.0' in lines
        assert f"http_request_duration_seconds_sum{{{where}}} {seconds!r}" in lines


def test_processes_and_rings_have_a_series_each() -> None:
    lines = text().splitlines()
    for role in ("http0", "http1"):
        assert f'process_cpu_seconds_total{{role="{role}"}} 2.5' in lines
    assert 'ppengine_stage_step_seconds{model_name="m",stage="0",rank="0",quantile="0.99"} 0.004' in lines
    assert 'ppengine_stage_idle_ratio{model_name="m",stage="0",rank="0"} 0.25' in lines
    assert not any(line.startswith("ppengine_stage_rank_wait_ratio{") for line in lines), "not known"


BOARD_LABELS = {
    "vllm:request_success_total": {"finished_reason"},
    "vllm:num_requests_waiting_by_reason": {"reason"},
    "vllm:prompt_tokens_by_source_total": {"source"},
    "vllm:prompt_tokens_cached_by_source_total": {"source"},
    "vllm:cache_config_info": {
        "num_gpu_blocks", "block_size", "cache_dtype", "gpu_memory_utilization", "enable_prefix_caching",
        "prefix_caching_hash_algo", "num_cpu_blocks", "kv_offloading_backend", "kv_offloading_size",
    },
    "http_requests_total": {"status", "handler"},
    "http_request_duration_seconds_bucket": {"handler", "le"},
}  # fmt: skip
"""Labels that queries of vLLM's boards select or group by, beside model and engine, job and instance."""
PROCESS = ["start_time_seconds", "cpu_seconds_total", "resident_memory_bytes", "open_fds", "max_fds"]


def test_samples_have_the_labels_that_the_boards_select() -> None:
    found: dict[str, set[str]] = {}
    for line in text().splitlines():
        if not line.startswith("#"):
            found.setdefault(line.partition("{")[0], set()).update(re.findall(r'([a-z_]+)="', line))
    for name, labels in BOARD_LABELS.items():
        assert labels <= found[name], name
        assert not name.startswith("vllm:") or {"model_name", "engine"} <= found[name]
    assert {f"process_{name}" for name in PROCESS} <= set(found)


TIERS = TiersInfo(
    slots=8, slots_swapped=1, slots_cached=4, slots_moving=2, slots_quarantined=1, slot_bytes=10,
    prompt_tokens_total=120, device_hit_tokens_total=40, host_hit_tokens_total=20, computed_tokens_total=45,
    in_bytes_total=70, out_bytes_total=80, finding=1, fetching=2, dropped_total=6, ready=True,
    stores=[
        StoreInfo(stage=0, rank=0, pid=7, age_ms=300.0, jobs=2, lag_ms=1500.0), StoreInfo(stage=1, rank=0),
        StoreInfo(stage=2, rank=0, pid=8, age_ms=300.0),
    ],
    backends=[
        BackendInfo(
            name="nvme0", kind="files", url="/kv", write="reused", state="open", quota_bytes=1000, used_bytes=600,
            hit_tokens_total=15, read_bytes_total=5, written_bytes_total=6, errors_total=2, corrupt_total=1,
            read_ms=Quantiles(p50=3.0, p99=18.0, count=9),
        ),
        BackendInfo(name="c", kind="valkey", url="", write="always", quota_bytes=9),
    ],
)  # fmt: skip
"""Half of what can be known."""


def test_tiers_have_their_own_names_and_those_of_vllm() -> None:
    assert "tier" not in text() and "lookup" not in text()
    lines = text(tiers=TIERS).splitlines()
    for line in (
        'ppengine_tier_tokens_total{model_name="m",tier="device"} 40.0',
        'ppengine_tier_tokens_total{model_name="m",tier="nvme0"} 15.0',
        'ppengine_tier_slots{model_name="m",use="free"} 1.0',
        'ppengine_tier_used_bytes{model_name="m",tier="host"} 70.0',
        'ppengine_tier_bytes_total{model_name="m",tier="nvme0",direction="out"} 6.0',
        'ppengine_tier_backend_info{model_name="m",tier="c",state="unknown",breaker="closed",'
        'write_breaker="closed"} 1.0',
        'ppengine_tier_backend_seconds{model_name="m",tier="nvme0",call="read",quantile="0.99"} 0.018',
        'ppengine_tier_store_lag_seconds{model_name="m",stage="0",rank="0"} 1.5',
        'ppengine_tier_store_lag_seconds{model_name="m",stage="2",rank="0"} 0.0',
        'vllm:kv_offload_lookup_async_delay_seconds_count{model_name="m",engine="0"} 0.0',
        'vllm:external_prefix_cache_queries_total{model_name="m",engine="0"} 60.0',
        'vllm:external_prefix_cache_hits_total{model_name="m",engine="0"} 15.0',
        'vllm:num_requests_kv_fetch_by_stage{model_name="m",engine="0",stage="waiting_to_start"} 1.0',
        'vllm:num_requests_kv_fetch_by_stage{model_name="m",engine="0",stage="in_progress"} 2.0',
        'vllm:kv_offload_cpu_cache_write_usage_perc{model_name="m",engine="0"} 0.25',
        'vllm:kv_offload_allocation_failure_total{model_name="m",engine="0"} 6.0',
        'vllm:kv_offload_tiering_read_bytes_total{model_name="m",engine="0",tier="nvme0"} 5.0',
        'vllm:num_requests_waiting{model_name="m",engine="0"} 3.0',
        'vllm:num_requests_waiting_by_reason{model_name="m",engine="0",reason="deferred"} 3.0',
    ):
        assert line in lines, line
    unknown = [line for line in lines if line.startswith("ppengine_tier_used_bytes{") and 'tier="c"' in line]
    assert not unknown and not any('stage="1"' in line for line in lines if "tier_store" in line)
    assert all(SAMPLE.fullmatch(line) for line in lines if not line.startswith("#"))


def test_hits_of_external_caches_outlive_their_backend() -> None:
    hits = 'vllm:external_prefix_cache_hits_total{model_name="m",engine="0"} 15.0'
    assert hits in text(tiers=TIERS).splitlines()
    assert hits in text(tiers=msgspec.structs.replace(TIERS, backends=[])).splitlines(), "a counter never falls"


DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_the_board_asks_for_metrics_that_exist() -> None:
    board = json.loads((DEPLOY / "grafana-engine.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    there = set(re.findall(r"^([a-z_:]+)", text(slo=SloConfig(ttft_ms=500), tiers=TIERS), re.M))
    asked = {name for query in queries for name in re.findall(r"\b(?:vllm:|ppengine_|http_|process_)[a-z_]+", query)}
    assert len(asked) > 15 and asked <= there, asked - there


def test_manifests_probe_the_paths_that_exist() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    pods = next(one for one in documents if one["kind"] == "StatefulSet")["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert [one["metrics_path"] for one in scrape] == ["/metrics"]


def test_edges_of_lengths_end_at_the_longest_sequence() -> None:
    assert length_edges(100) == [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0] and length_edges(0) == [1.0]
    buckets = BucketCounts([1, 2])
    for value in (1, 1.5, 2, 3):
        buckets.add(value, 2)
    assert buckets.wire().counts == [2, 4, 2] and buckets.wire().sum == 15.0
