"""Stores and backends of KV tiers: named with what to do, and never the root of a stage's fault."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from diagnosis_world import evidence, healthy, pipeline_held_at, stuck, with_stage
from monitor_helpers import core_report, make_config, processes, remove, stage_process
from msgspec.structs import replace
from ppengine.common.config import EngineConfig
from ppengine.diagnosis import diagnose
from ppengine.diagnosis.budgets import CHURN_LEAST, CORRUPT_TOLD_S, STORE_GONE_S, STORE_SILENT_S, TIER_WINDOW_S
from ppengine.diagnosis.evidence import CoreEvidence
from ppengine.diagnosis.tier_evidence import BackendEvidence, StoreEvidence, TierEvidence
from ppengine.diagnosis.tier_history import TierHistory
from ppengine.gateway.collector import Collector
from ppengine.gateway.event_log import EventLog
from ppengine.gateway.fault_record import FaultRecorder
from ppengine.protocol.backend_calls import BackendCall
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.reports import NODE_LOST, ProcessInfo
from ppengine.protocol.snapshot import Event, Verdict
from ppengine.protocol.tiers import BackendInfo, StoreInfo, TiersInfo

WORKS = StoreEvidence(stage=0, pid=70, age_s=0.4, jobs=3, lag_s=0.1, process_state="S")
NVME = BackendEvidence(name="nvme0", fill=0.5)
GOES_ON = "requests and steps go on; prompts are computed instead of loaded"


def verdicts(*stores: StoreEvidence, backends: tuple[BackendEvidence, ...] = (NVME,), **changes) -> list[Verdict]:
    tiers = TierEvidence(stores=stores or (WORKS,), backends=backends)
    return diagnose(evidence(healthy(2), tiers=tiers, **changes))


def one(*stores: StoreEvidence, backends: tuple[BackendEvidence, ...] = (NVME,)) -> Verdict:
    (verdict,) = verdicts(*stores, backends=backends)
    assert (verdict.stage, verdict.cause, verdict.root) == (None, "store", True)
    assert verdict.evidence[-1] == GOES_ON and len(verdict.summary) <= 100
    return verdict


def test_at_work_is_no_fault() -> None:
    assert verdicts() == []
    assert verdicts(replace(WORKS, age_s=None, jobs=0, lag_s=None)) == [], "it has just begun"
    assert verdicts(replace(WORKS, absent_for_s=5.0, age_s=None)) == [], "it may come yet"


def test_a_store_that_is_restarted_within_a_second_is_no_fault_and_then_it_is_named() -> None:
    gone = replace(WORKS, stage=1, rank=2, gone_for_s=STORE_GONE_S - 0.1, exit_code=-9)
    assert verdicts(gone) == []
    found = one(replace(gone, gone_for_s=STORE_GONE_S, exit_detail="killed by SIGKILL"))
    assert found.summary == "the store of stage 1 rank 2 was killed by SIGKILL"
    assert found.since_s == STORE_GONE_S and found.suggest.startswith("ppconsole logs")


def test_a_store_that_a_backend_has_ended_is_named_with_its_call() -> None:
    calls = [BackendCall("write", "b1")]
    gone = replace(WORKS, gone_for_s=STORE_GONE_S, exit_code=-11, calls=calls, exit_detail="killed by SIGSEGV")
    found = one(gone)
    assert found.summary == "the store of stage 0 was killed by SIGSEGV while write of b1 was under way"
    assert found.suggest == "ppconsole store pause b1 (its package ends the store)"
    assert one(replace(gone, calls=[*calls, BackendCall("read", "b0")])).suggest.startswith("ppconsole logs")


def test_a_store_that_goes_with_its_node_is_no_fault_of_its_own() -> None:
    assert verdicts(replace(WORKS, stage=1, gone_for_s=60.0, exit_code=NODE_LOST)) == []


def test_one_that_hangs_is_named_by_what_it_owes() -> None:
    assert verdicts(replace(WORKS, age_s=STORE_SILENT_S - 0.1)) == []
    found = one(replace(WORKS, age_s=STORE_SILENT_S, lag_s=1.6))
    assert found.summary == "the store of stage 0 hangs: silent for 1.5s, it owes 3 jobs, the oldest for 1.6s"
    assert found.suggest.startswith("kill -KILL 70 (")
    far = one(replace(WORKS, age_s=STORE_SILENT_S, lag_s=1.6, node="b"))
    assert far.summary.startswith("the store of stage 0 on b hangs") and far.suggest.startswith("kill -KILL 70 on b (")
    assert verdicts(replace(WORKS, age_s=STORE_SILENT_S, jobs=0)) == [], "without a job it gets more time"
    stopped = one(replace(WORKS, age_s=1.0, process_state="T"))
    assert "stopped by a signal" in stopped.summary and stopped.suggest == "kill -CONT 70"
    assert "does not come up" in one(replace(WORKS, age_s=None, absent_for_s=60.0)).summary


def test_a_broken_backend_is_named_with_its_error() -> None:
    broken = replace(NVME, name="cache0", state="broken", breaker="open", error="connection refused", errors=41)
    found = one(backends=(NVME, replace(broken, broken_for_s=0.0)))
    assert found.summary == "backend cache0 is broken: connection refused"
    assert found.suggest == "ppconsole store pause cache0"
    assert found.evidence[0] == "state broken, breaker of reads open, of writes closed, 41 calls failed or timed out"
    assert verdicts(backends=(replace(broken, broken_for_s=9.0, state="paused"),)) == [], "as suggested"
    unopened = one(backends=(NVME, replace(broken, breaker="closed", broken_for_s=9.0)))
    assert unopened.suggest == "ppconsole store test cache0 (opens it, once that is mended)"


def test_a_backend_that_is_read_on_is_named_by_its_writes() -> None:
    full = replace(NVME, write_breaker="open", error="No space left on device", errors=378, broken_for_s=3.0)
    found = one(backends=(full,))
    assert found.summary == "backend nvme0 fails writes, and is read on: No space left on device"
    assert found.suggest == "ppconsole store drain nvme0 (read on, nothing written)"
    assert found.evidence[0] == "state open, breaker of reads closed, of writes open, 378 calls failed or timed out"
    assert verdicts(backends=(replace(full, state="draining"),)) == [], "as suggested"
    assert "is broken" in one(backends=(replace(full, breaker="open"),)).summary


def test_corrupt_shards_are_named_for_a_while() -> None:
    corrupt = replace(NVME, corrupt=7, corrupt_new=3, corrupt_ago_s=0.2)
    found = one(backends=(corrupt,))
    assert found.summary == "backend nvme0 gave 3 corrupt shards" and "7 in all" in found.evidence[0]
    assert one(backends=(replace(corrupt, corrupt_new=1),)).summary.endswith("1 corrupt shard")
    assert verdicts(backends=(replace(corrupt, corrupt_ago_s=CORRUPT_TOLD_S + 0.1),)) == []
    assert verdicts(backends=(replace(corrupt, state="paused"),)) == [], "as suggested"
    refused = replace(NVME, name="cache0", breaker="open", broken_for_s=3.0, error="refused")
    assert one(backends=(corrupt, refused)).summary == "backend cache0 is broken: refused", "the present fault first"


def test_a_slow_backend_is_named_where_its_job_waits() -> None:
    late = replace(WORKS, stage=1, lag_s=2.4)
    waited = replace(NVME, queue=4, slowest_ms=870.0)
    found = one(WORKS, late, backends=(replace(NVME, name="a"), waited))
    assert found.summary == "backend nvme0 is slow: a job waits 2.4s at the store of stage 1"
    assert found.evidence[1] == "4 calls wait for nvme0; p99 of a call: 870 ms"
    assert verdicts(WORKS, late) == [], "a clear takes long, and no call waits for it"


def test_a_full_backend_is_a_fault_only_while_nothing_is_found_in_it() -> None:
    churns = replace(NVME, fill=0.99, evicted_new=640, churns_for_s=75.0)
    found = one(backends=(churns,))
    assert found.summary.startswith("backend nvme0 is full") and found.since_s == 75.0
    for change in ({"churns_for_s": None}, {"fill": 0.5}, {"fill": None}, {"state": "paused"}, {"state": "draining"}):
        assert verdicts(backends=(replace(churns, **change),)) == [], change


def test_the_worst_is_named_and_the_others_are_data() -> None:
    dead = replace(WORKS, gone_for_s=3.0, exit_code=1)
    found = one(dead, backends=(replace(NVME, broken_for_s=9.0, error="refused", corrupt_ago_s=1.0),))
    assert found.summary == "the store of stage 0 exited with code 1"
    assert found.subject == "the store of stage 0"
    assert [(other.subject, other.summary) for other in found.further] == [
        ("backend nvme0", "backend nvme0 is broken: refused"), ("backend nvme0", "backend nvme0 gave 1 corrupt shard"),
    ]  # fmt: skip


def test_each_fault_names_its_store_or_backend_by_a_field() -> None:
    """The same one on another node, or with another fault, has the same name."""
    hangs = replace(WORKS, rank=1, node="b", age_s=60.0, lag_s=2.0)
    assert one(hangs).subject == one(replace(hangs, node="c")).subject == "the store of stage 0 rank 1"
    assert one(hangs).summary.startswith("the store of stage 0 rank 1 on b hangs")
    faults: list[dict[str, object]] = [
        {"broken_for_s": 9.0, "error": "refused"}, {"corrupt_ago_s": 1.0}, {"fill": 1.0, "churns_for_s": 9.0},
        {"errors_ago_s": 0.1, "errors_new": 99, "error": "full"},
    ]  # fmt: skip
    found = [one(backends=(replace(NVME, **fault),)) for fault in faults]
    assert {each.subject for each in found} == {"backend nvme0"} and len({each.summary for each in found}) == 4
    slow = one(replace(WORKS, lag_s=2.4), backends=(replace(NVME, queue=4),))
    assert slow.subject == "backend nvme0" and " is slow" in slow.summary


@pytest.mark.parametrize("k", [0, 1])
def test_it_never_explains_a_stage_and_comes_behind_its_fault(k: int) -> None:
    tiers = TierEvidence(stores=(replace(WORKS, gone_for_s=60.0, exit_code=1),))
    found = diagnose(stuck(pipeline_held_at(2, k), tiers=tiers))
    assert [(each.stage, each.cause) for each in found if each.root] == [(k, "self_stuck"), (None, "store")]
    without = diagnose(stuck(pipeline_held_at(2, k)))
    assert [each for each in found if each.cause != "store"] == without
    dead = with_stage(healthy(2), k, exit_code=-9, dead_for_s=0.6, oom_kills=0)
    assert diagnose(evidence(dead, tiers=tiers))[0].cause == "dead"


def test_old_figures_and_an_engine_that_stops_are_not_judged() -> None:
    dead = replace(WORKS, gone_for_s=60.0, exit_code=1)
    assert verdicts(dead, stopping=True) == []
    silent = verdicts(dead, core=CoreEvidence(pid=5, report_age_s=9.0))
    assert [each.cause for each in silent] == ["core"]


def test_it_opens_no_record_and_hides_none() -> None:
    recorder = FaultRecorder(lambda _: "")
    store = one(replace(WORKS, gone_for_s=60.0, exit_code=1))
    recorder.look([store], [], [])
    assert recorder.kept is None
    (stage,) = diagnose(evidence(with_stage(healthy(2), 1, exit_code=-9, dead_for_s=0.6, oom_kills=0)))
    recorder.look([stage, store], [], [])
    assert recorder.kept is not None and recorder.kept.verdict.stage == 1


# --- the memory behind it ---------------------------------------------------------------------------------------


class World:
    """A history with a clock, one store and one backend."""

    def __init__(self, ranks: int = 1) -> None:
        self.history, self.ns = TierHistory(ranks), 10**9
        self.store = StoreInfo(stage=0, rank=0, pid=70, age_ms=300.0)
        self.backend = BackendInfo(
            name="a", kind="files", url="", write="reused", state="open", quota_bytes=100, used_bytes=99
        )
        self.processes = [ProcessInfo(role="store0", stage=None, rank=None, pid=70)]

    def look(self, after_s: float = 0.0) -> TierEvidence:
        self.ns += int(after_s * 1e9)
        tiers = TiersInfo(stores=[self.store], backends=[self.backend])
        found = self.history.look(self.ns, tiers, self.ns, self.processes, {70: "S", 71: "S"})
        assert found is not None
        return found

    def seen(self, after_s: float = 0.0) -> StoreEvidence:
        return self.look(after_s).stores[0]


def test_a_store_is_gone_since_its_end_was_seen_and_its_successor_is_given_time() -> None:
    world = World()
    world.look()
    assert world.seen(5.0).age_s == 0.3 and world.seen().process_state == "S"
    world.processes[0] = replace(world.processes[0], exit_code=-9, detail="killed by SIGKILL")
    assert world.seen(0.1).gone_for_s == 0.0
    gone = world.seen(0.7)
    assert gone.gone_for_s == pytest.approx(0.7) and gone.exit_code == -9 and gone.age_s is None
    world.processes.append(ProcessInfo(role="store0", stage=None, rank=None, pid=71))
    world.store.age_ms = 9000.0
    fresh = world.seen(0.1)
    assert fresh.gone_for_s is None and fresh.absent_for_s == 0.0 and fresh.age_s is None
    world.store.pid = 71
    assert world.seen(1.0).age_s is None and world.seen(1.5).age_s == 9.0


def test_stores_of_ranks_are_told_apart() -> None:
    world = World(ranks=2)
    world.store = StoreInfo(stage=0, rank=1, pid=71, age_ms=1.0)
    world.processes.append(ProcessInfo(role="store0.1", stage=None, rank=None, pid=71, exit_code=1))
    assert world.seen().name == "the store of stage 0 rank 1" and world.seen(1.0).gone_for_s == 1.0


def test_counts_before_the_first_look_are_no_news() -> None:
    world = World()
    world.backend.corrupt_total = 5
    assert world.look().backends[0].corrupt_ago_s is None
    world.backend.corrupt_total = 7
    found = world.look(1.0).backends[0]
    assert (found.corrupt, found.corrupt_new, found.corrupt_ago_s) == (7, 2, 0.0)
    assert world.look(3.0).backends[0].corrupt_ago_s == 3.0
    world.backend.corrupt_total = 1
    assert world.look(1.0).backends[0].corrupt_ago_s is None, "another core counts again"


@pytest.mark.parametrize("known", [False, True])
def test_counts_that_stores_bring_to_another_core_are_no_news(known: bool) -> None:
    """The core before it may be `known`, or have had no figures for a moment."""
    world = World()
    if known:
        world.backend.corrupt_total = 13
        world.look()
    for state, total in (("unknown", 0), ("opening", 0), ("opening", 8), ("open", 13)):
        world.backend.state, world.backend.corrupt_total = state, total
        found = world.look(0.5).backends[0]
        assert (found.corrupt_new, found.corrupt_ago_s) == (0, None)
    world.backend.corrupt_total = 14
    assert world.look(0.5).backends[0].corrupt_ago_s == 0.0


def test_a_backend_churns_while_a_minute_brings_no_hit() -> None:
    world, seconds = World(), int(TIER_WINDOW_S)

    def churns(evicted: int, times: int) -> list[float | None]:
        seen = []
        for _ in range(times):
            world.backend.evicted_total += evicted
            seen.append(world.look(1.0).backends[0].churns_for_s)
        return seen

    seen = churns(10, seconds + 5)
    assert seen[10] is None and seen[-1] == pytest.approx(seconds + 4.0), "its time goes on, with the window before"
    assert None not in churns(CHURN_LEAST // seconds, 2 * seconds), "fewer shards do not end it at once"
    world.backend.evicted_total += CHURN_LEAST
    world.backend.hit_tokens_total += 16
    assert world.look(1.0).backends[0].churns_for_s is None
    assert None not in churns(10, 2 * seconds)[seconds:], "until the hit is a minute old"
    assert churns(0, seconds)[-1] is None


def test_a_backend_at_the_limit_does_not_begin_and_end_to_churn_with_each_shard() -> None:
    world = World()
    changes, before = 0, None
    for second in range(600):
        world.backend.evicted_total += 20 * (second % 21 == 0)
        now = world.look(1.0).backends[0].churns_for_s
        changes, before = changes + ((now is None) != (before is None)), now
    assert changes <= 1


def test_a_backend_is_broken_from_its_first_report_until_its_breaker_is_closed() -> None:
    world = World()
    assert world.look().backends[0].broken_for_s is None
    world.backend.state, world.backend.breaker = "broken", "open"
    assert world.look(1.0).backends[0].broken_for_s == 0.0
    world.backend.state, world.backend.breaker = "open", "half-open"
    assert world.look(2.0).backends[0].broken_for_s == 2.0
    world.backend.breaker, world.backend.read_ms = "closed", Quantiles(p99=12.0, count=1)
    found = world.look(1.0).backends[0]
    assert found.broken_for_s is None and found.slowest_ms == 12.0
    assert world.history.look(world.ns, None, world.ns, [], {}) is None


def test_calls_that_fail_beside_others_are_named_while_they_do() -> None:
    world = World()
    world.look()
    for failed in (3, 3):
        world.backend.errors_total += failed
        world.backend.error = "File too large"
        found = world.look(1.0).backends[0]
    assert (found.errors_new, found.errors_ago_s, found.error) == (6, 0.0, "File too large")
    world.backend.error = ""  # A read has succeeded.
    found = world.look(2.0).backends[0]
    named = one(backends=(found,))
    assert named.summary == "backend a fails: File too large"
    assert named.evidence[0] == "calls that failed or timed out: 6 in 60 s, 6 in all"
    assert verdicts(backends=(replace(found, errors_ago_s=11.0),)) == []
    assert verdicts(backends=(replace(found, errors_new=4),)) == []
    assert verdicts(backends=(replace(found, state="paused"),)) == [], "nothing calls it"


@pytest.fixture
def config() -> Iterator[EngineConfig]:
    made = make_config()
    yield made
    remove(made)


def test_the_gateway_names_a_broken_backend_at_its_first_report(config: EngineConfig) -> None:
    events: list[Event] = []
    collector = Collector(config, EventLog(events.append))
    broken = BackendInfo(
        name="a", kind="files", url="/kv", write="reused", quota_bytes=1, state="broken", error="no such folder"
    )
    store = ProcessInfo(role="store0", stage=None, rank=None, pid=os.getpid())
    collector.take(processes(stage_process(0), stage_process(1), store))
    tiers = TiersInfo(stores=[StoreInfo(stage=0, rank=0, pid=os.getpid(), age_ms=1.0)])
    for backends, causes in (([], []), ([broken], ["store"]), ([], [])):
        tiers = replace(tiers, backends=backends)
        collector.take(core_report(config, tiers=tiers))
        collector.judge(False)
        assert [verdict.cause for verdict in collector.verdicts if verdict.root] == causes
    (_, raised, cleared) = ["", *(event.text for event in events if event.kind.startswith("verdict."))]
    assert raised == "store: backend a is broken: no such folder" and cleared.endswith("no such folder")
