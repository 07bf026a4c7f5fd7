"""The end of a process is one event of the gateway, which says all: the process, the reason, the effect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from monitor_helpers import make_config, remove
from msgspec.structs import replace
from ppengine.common.config import EngineConfig
from ppengine.common.tier_config import BackendConfig
from ppengine.gateway.collector import Collector
from ppengine.gateway.event_log import EventLog
from ppengine.gateway.process_ends import end_event
from ppengine.protocol.facts import Exited
from ppengine.protocol.severity import level_of
from ppengine.protocol.snapshot import Event


@pytest.fixture
def config() -> Iterator[EngineConfig]:
    """Return the configuration of two stages with a backend."""
    made = make_config()
    tiers = replace(made.profile.tiers, host=True, backends={"nvme0": BackendConfig(kind="memory", quota_gib=0.1)})
    yield replace(made, profile=replace(made.profile, tiers=tiers))
    remove(made)


def killed(role: str, exit_code: int = -9, detail: str = "killed by SIGKILL") -> Exited:
    return Exited(mono_ns=1, role=role, place=None, generation=1, pid=70, exit_code=exit_code, detail=detail)


def test_a_killed_store_is_one_line_that_says_all(config: EngineConfig) -> None:
    events: list[Event] = []
    log = EventLog(events.append)
    for _ in range(2):  # The supervisor repeats its facts to each new gateway.
        Collector(config, log).take(killed("store1"))
    (event,) = events
    assert (event.kind, event.stage, level_of(event)) == ("store1.ended", 1, "warning"), "it is back by itself"
    assert event.text == (
        "the store of stage 1 (pid 70) has ended, killed by SIGKILL; "
        "prompts are computed, not fetched, until its successor is there"
    )


def test_a_store_of_a_rank_is_named_with_it(config: EngineConfig) -> None:
    parallel = replace(config.profile.parallel, tensor=2)
    ranks = replace(config, profile=replace(config.profile, parallel=parallel))
    end = end_event(ranks, killed("store1.1", 3, ""))
    assert end is not None and (end.kind, end.stage) == ("store1.1.ended", 1)
    assert end.text.startswith("the store of stage 1 rank 1 (pid 70) has ended, exit code 3; ")


def test_others_are_named_without_a_stage_and_stages_by_other_parts(config: EngineConfig) -> None:
    agent = end_event(config, killed("agent"))
    assert agent is not None and (agent.kind, agent.stage) == ("agent.ended", None)
    assert end_event(config, killed("core", 0, "")) is None, "it ended on request"
    assert end_event(config, killed("stage")) is None
