"""The bench of the host tier refuses a run whose prompts had not left the device."""

from __future__ import annotations

from typing import Any

from bench_host_tier import Round, Sources, by_source, sources_between, still_on_device


def picture(found: int, tiers: dict[str, int] | None = None) -> dict[str, Any]:
    return {"prefix_hit_tokens_total": found, "tiers": tiers}


def test_sources_of_an_engine_without_tiers() -> None:
    assert sources_between(picture(100), picture(1123), 1032) == Sources(1023, 0, 0, 9)


def test_sources_of_an_engine_with_tiers() -> None:
    names = "device_hit_tokens_total", "host_hit_tokens_total", "computed_tokens_total"
    before, after = (dict(zip(names, figures, strict=True)) for figures in ((5, 10, 20), (21, 42, 28)))
    found = sources_between(picture(0, before), picture(0, after), 1000)
    assert found == Sources(device=16, host=32, backends=944, computed=8)
    assert found.main == "backends"


def test_a_prompt_that_is_still_on_the_device_is_refused() -> None:
    each = Round(1.0, 8, {}, [0.165, 0.03], [Sources(16, 0, 0, 8184), Sources(8176, 0, 0, 24)])
    (line,) = still_on_device("off", each)
    assert line.startswith("off, request 1: 8176 of 8200 prompt tokens were still on the device; ")


def test_times_are_listed_by_source() -> None:
    fetched, computed = Sources(0, 0, 8192, 8), Sources(0, 0, 0, 8200)
    rounds = [Round(1.0, 8, {}, [0.1, 0.2], [fetched, computed]), Round(1.0, 8, {}, [0.3], [fetched])]
    assert list(by_source("on", rounds)) == [
        "on: TTFT p50   200.0 ms of 2 prompts, most of them backends",
        "on: TTFT p50   200.0 ms of 1 prompts, most of them computed",
    ]


def test_a_workload_without_sources_lists_none() -> None:
    assert list(by_source("on", [Round(1.0, 8, {}, [0.1, 0.2])])) == []
