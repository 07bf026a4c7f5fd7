"""Service level objectives: which requests meet them, over which time, and in the report of a core."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_world import CoreWorld
from ppengine.common.config import ConfigError, build_profile
from ppengine.common.profile_sections import SloConfig
from ppengine.core.slo_window import SloWindow


def test_each_objective_is_judged_and_aborts_are_not() -> None:
    window = SloWindow(SloConfig(ttft_ms=200, itl_ms=50))
    for reason, ttft_s, itl_ms in (
        ("stop", 0.2, 50.0),
        ("length", 0.1, None),  # a single token has no time between tokens
        ("stop", 0.201, 50.0),
        ("stop", 0.1, 50.1),
        ("stop", 0.3, 60.0),
        ("lost", 0.1, 10.0),
        ("lost", None, None),
        ("abort", 9.0, 900.0),
    ):
        window.ended(reason, ttft_s, itl_ms, 5.0)
    info = window.info(5.0)
    assert info is not None
    assert (info.finished, info.met, info.ttft_missed, info.itl_missed) == (7, 2, 3, 2)
    assert info.goodput == 2 / 7
    assert (window.met_total, window.missed_total) == (2, 5)


def test_one_objective_leaves_the_other_free() -> None:
    window = SloWindow(SloConfig(itl_ms=50))
    window.ended("stop", 99.0, 50.0, 0.0)
    info = window.info(0.0)
    assert info is not None and (info.ttft_ms, info.itl_ms, info.goodput) == (None, 50.0, 1.0)


def test_the_window_is_five_minutes() -> None:
    window = SloWindow(SloConfig(ttft_ms=100))
    window.ended("stop", 0.2, None, 0.0)
    window.ended("stop", 0.05, None, 200.0)
    assert [info.goodput for at in (200.0, 299.0, 301.0, 501.0) if (info := window.info(at))] == [0.5, 0.5, 1.0, None]
    assert (window.met_total, window.missed_total) == (1, 1), "totals stay"


def test_without_an_objective_nothing_is_counted() -> None:
    window = SloWindow(SloConfig())
    window.ended("stop", 9.0, 9.0, 0.0)
    assert window.info(0.0) is None and window.missed_total == 0


def test_the_report_has_the_goodput_of_real_requests() -> None:
    world = CoreWorld(slo=SloConfig(ttft_ms=500))
    for name, wait in (("a", 0.4), ("b", 0.6)):
        world.submit(name=name, max_tokens=3)
        world.now += wait
        world.run()
    slo = world.engine.reporter.build().latency.slo
    assert slo is not None
    assert (slo.finished, slo.met, slo.ttft_missed, slo.goodput) == (2, 1, 1, 0.5)
    assert CoreWorld().engine.reporter.build().latency.slo is None


@pytest.mark.parametrize("value", [0, -1, "fast", 1e12])
def test_an_objective_out_of_range_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"slo\.ttft_ms is .*; it must be (a number, )?above 0 and at most 600000"):
        build_profile({"name": "x", "model": {"path": "m"}, "slo": {"ttft_ms": value}}, Path())
