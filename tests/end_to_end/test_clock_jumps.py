"""The wall clock jumps under a live engine, its consoles and commands: work goes on, and ages stay ages."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from engines import run_module, wait_until
from ppengine.common.config import load_profile
from serving import Served, audited
from wall_clock import NoWallClockError, WallClock

TOKENS = 200
HOUR, DAY = 3600, 86_400


class OwnProcesses(Served):
    """An engine whose processes are started as users do: the clock is preloaded into new processes alone."""

    launch = staticmethod(run_module)


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> WallClock:
    try:
        return WallClock(tmp_path_factory.mktemp("clock"))
    except NoWallClockError as error:
        pytest.skip(f"no clock can be set: {error}")


@pytest.fixture(scope="module")
def engine(clock: WallClock) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in clock.env.items():
            patch.setenv(name, value)
        with OwnProcesses(load_profile("tiny", ["model.dtype=float64"])) as served:
            yield served
            clock.set(0)


def answer(engine: Served, clock: WallClock, jump: int) -> list[int]:
    """Return the tokens of a request during which the clock jumps."""
    words = ("--max-tokens", str(TOKENS), "--temperature", "0", "--ignore-eos", "--json")
    process = engine.start_cli("submit", "Once upon a time", *words)
    lines = [process.stdout.readline()]
    clock.set(jump)
    lines += process.stdout.readlines()
    ran = engine.end_of(process)
    assert ran.code == 0, ran.err
    return [token for line in lines for token in json.loads(line).get("token_ids", [])]


def test_requests_ages_and_the_lease_survive_jumps(engine: Served, clock: WallClock) -> None:
    begun = time.monotonic()
    assert engine.cli("lease", "take", "--ttl", "600").code == 0
    expected = answer(engine, clock, 0)
    assert len(expected) == TOKENS
    for jump in (HOUR, -HOUR, DAY):
        assert answer(engine, clock, jump) == expected
        picture = engine.cli("status", "--json").json
        assert picture["verdicts"] == [] and picture["engine"]["state"] == "serving"
        assert 0 < picture["engine"]["uptime_s"] < time.monotonic() - begun + 60
        assert all(0 <= stage["sample_age_ms"] < 5000 for stage in picture["stages"])
        left_s = engine.cli("lease", "show", "--json").json["lease"]["left_s"]
        assert 600 - (time.monotonic() - begun) - 1 < left_s <= 600, "its time is not the wall clock's"
    assert {(outcomes[0], outcomes[-1]) for outcomes in audited(engine).values()} == {("received", "applied")}
    assert engine.cli("lease", "release").code == 0


def test_an_incident_lasts_as_long_as_it_does(engine: Served, clock: WallClock) -> None:
    clock.set(DAY)
    begun = time.monotonic()
    with engine.stopped("stage1"):
        wait_until(lambda: engine.cli("explain").code == 10, "the stopped stage is named")
        clock.set(DAY - HOUR)
    wait_until(lambda: engine.cli("explain").code == 0, "it is over")
    took = time.monotonic() - begun
    # Earlier engines of this name, of other tests, are listed too.
    mine = lambda: [one for one in engine.cli("incidents", "--json").json if one["engine"] == engine.config.id]  # noqa: E731
    (incident,) = wait_until(mine, "the incident is listed")
    assert 0 < incident["info"]["over_wall"] - incident["info"]["wall"] <= took
    ran = engine.cli("history")
    assert ran.code == 0, ran.err
