"""Reports into evidence and snapshots: ages, states, unknowns."""

import socket
import subprocess
import time
from types import SimpleNamespace
from typing import get_type_hints

import msgspec
import pytest
from monitor_helpers import MIB, core_report, make_config, processes, remove, sample, stage_process, view
from ppengine.common.ptrace_pauses import PauseFilter, PauseHistory, PtracePauses
from ppengine.diagnosis import diagnose
from ppengine.diagnosis.fault_log import FaultLog
from ppengine.diagnosis.process_history import Sighting
from ppengine.diagnosis.tracker import EvidenceTracker, newest_process
from ppengine.gateway.collector import Collector
from ppengine.gateway.event_log import EventLog
from ppengine.gateway.gateway import Gateway
from ppengine.gateway.merge import Inputs, merge
from ppengine.protocol.discovery import process_start
from ppengine.protocol.facts import Exited, Lost
from ppengine.protocol.gpu import GpuInfo, GpuProcess, Xid
from ppengine.protocol.place import Place
from ppengine.protocol.reports import Finding, HeldTurns, ProcessInfo
from ppengine.protocol.snapshot import ChecksInfo, Queues, Verdict
from ppengine.protocol.stage_info import PlaceLinks, StageInfo, SumsInfo, SumTime, Waiting
from ppengine.protocol.stage_samples import AgentReport, PaceSample
from ppengine.protocol.tiers import TiersInfo

S = 1_000_000_000


@pytest.fixture
def config():
    made = make_config()
    yield made
    remove(made)


def picture(config, *, now=10 * S, samples=(), at=10 * S, core=None, listed=None, **more):
    sightings = {(one.index, 0): Sighting(one, at) for one in samples}
    inputs = Inputs(mono_ns=now, wall=1000.0, core=core, sightings=sightings, processes=listed, **more)
    return merge(config, inputs)


# --- snapshot -----------------------------------------------------------------------------------------------


def test_before_anything_is_known_all_is_loading_and_unknown(config):
    found = picture(config)
    assert found.engine.state == "loading" and found.engine.epoch == config.epoch
    assert [stage.state for stage in found.stages] == ["loading", "loading"]
    first = found.stages[0]
    assert first.layers == [0, 2] and first.pid is None
    assert first.sample_age_ms is None and first.progress_age_ms is None and first.step_ms.p50 is None
    assert first.memory.total is None and first.memory.limit is None and first.kv_blocks.used is None
    assert found.core_age_ms is None and found.throughput.output_tok_s is None


def test_tiers_come_from_the_core(config):
    assert picture(config).tiers is None
    assert picture(config, core=core_report(config)).tiers is None
    assert picture(config, core=core_report(config, tiers=TiersInfo(slots=5))).tiers == TiersInfo(slots=5)


def test_links_of_a_place_pass_as_a_whole(config):
    links = PlaceLinks(carrier="RDMA", sums=SumsInfo(times=[SumTime(bytes=8, us=1.5)]))
    assert all(getattr(links, name) != getattr(PlaceLinks(), name) for name in PlaceLinks.__struct_fields__)
    core = core_report(config, stages=[view(0, links=links), view(1)])
    stages = picture(config, core=core).stages
    kinds, shown = get_type_hints(PlaceLinks), get_type_hints(StageInfo)
    for name, kind in kinds.items():
        assert [getattr(stage, name) for stage in stages] == [getattr(links, name), None]
        assert shown[name] == kind


def test_ages_grow_between_samples(config):
    found = picture(config, now=12 * S, at=10 * S, samples=[sample(0, progress_age_ms=30.0)],
                    core=core_report(config, mono_ns=11 * S))  # fmt: skip
    assert found.stages[0].sample_age_ms == 2000.0 and found.stages[0].progress_age_ms == 2030.0
    assert found.core_age_ms == 1000.0


def test_memory_adds_up(config):
    core = core_report(config)
    core.engine.memory_utilization = 0.25
    memory = picture(config, samples=[sample(0)], core=core).stages[0].memory
    assert memory.total == 64 * MIB and memory.limit == 16 * MIB and memory.used == 25 * MIB
    memory = picture(config, samples=[sample(0, gauges={})], core=core).stages[0].memory
    assert memory.used is None and memory.total == 64 * MIB, "the core knows the total, nobody the rest"


def test_a_stage_has_the_card_of_its_uuid_with_the_age_it_has_now(config):
    core = core_report(config)
    core.stages[0].device_uuid, core.stages[1].device_uuid = "GPU-b", "GPU-gone"
    seen = GpuInfo(uuid="GPU-b", memory_used=7, age_ms=50.0, xids=[Xid(code=79, age_ms=400.0)])
    collector = Collector(config, EventLog(lambda event: None))
    report = AgentReport(mono_ns=8 * S, node=socket.gethostname(), stages=[], gpus=[GpuInfo(uuid="GPU-a"), seen])
    collector.take(msgspec.json.decode(msgspec.json.encode(report), type=AgentReport))
    first, second = picture(config, now=10 * S, core=core, gpus=collector._gpus).stages
    assert first.gpu.processes is None
    assert first.gpu.memory_used == 7 and first.gpu.power_w is None
    assert first.gpu.age_ms == 2050.0 and first.gpu.xids[0].age_ms == 2400.0
    assert second.gpu is None, "no card is guessed"
    assert picture(config, core=core).stages[0].gpu is None
    assert picture(config, gpus=collector._gpus).stages[0].gpu is None, "the core has not told which card it is"


def test_blocks_and_binding_come_from_the_core(config):
    core = core_report(config, stages=[view(0), view(1, capacity=110, binding=True)], swap_used=3)
    found = picture(config, samples=[sample(0), sample(1)], core=core).stages
    assert (found[0].kv_blocks.used, found[0].kv_blocks.cached, found[0].kv_blocks.free) == (10, 5, 85)
    assert [stage.kv_blocks.capacity for stage in found] == [120, 110]
    assert [stage.kv_blocks.binding for stage in found] == [False, True]
    assert (found[0].swap_blocks.total, found[0].swap_blocks.used) == (64, 3)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"op": "idle"}, "idle"),
        ({"op": "receive"}, "receiving"),
        ({"op": "token_return"}, "receiving"),
        ({"op": "send"}, "sending"),
        ({"op": "forward"}, "computing"),
        ({"op": "sample"}, "computing"),
        ({"op": "swap_in"}, "swapping"),
        ({"op": "map"}, "resizing"),
        ({"op": None}, "idle"),
        ({"op": None, "begun_step": 8}, "computing"),
        ({"phase": "load", "op": "load"}, "idle"),  # an old sample: the core knows that it is ready
        ({"process_state": "T", "op": "forward"}, "stopped"),
        ({"process_state": None}, "dead"),
        ({"process_state": "Z"}, "dead"),
    ],
)
def test_stage_states(config, changes, state):
    found = picture(config, samples=[sample(1, **changes)], core=core_report(config))
    assert found.stages[1].state == state


def test_a_stage_is_ready_when_the_core_says_so_whoever_looks(config):
    loads = sample(0, phase="load", op="load")
    told = core_report(config, stages=[view(0, ready=False), view(1, oldest_unretired_age_ms=7.0)])
    assert [stage.state for stage in picture(config, samples=[loads], core=told).stages] == ["loading", "computing"]
    nobody = core_report(config, stages=[])
    assert [stage.state for stage in picture(config, samples=[loads], core=nobody).stages] == ["loading", "loading"]


def test_an_exit_status_and_a_verdict_name_the_state(config):
    verdict = Verdict(stage=1, cause="starved", summary="s", since_s=1.0, root=False)
    found = picture(
        config, samples=[sample(0), sample(1, op="receive")], core=core_report(config), verdicts=[verdict],
        listed=processes(stage_process(0, exit_code=-9), stage_process(1)),
    )  # fmt: skip
    assert [stage.state for stage in found.stages] == ["dead", "starved"]
    assert found.verdicts == [verdict]


def test_waiting_for_a_step_without_work_is_not_waiting(config):
    waiting = Waiting(stage=None, what="step", since_ms=5.0)
    found = picture(config, samples=[sample(0, waiting_on=waiting)], core=core_report(config))
    assert found.stages[0].waiting_on is None
    core = core_report(config, stages=[view(0, oldest_unretired_age_ms=7.0), view(1)])
    found = picture(config, now=11 * S, samples=[sample(0, waiting_on=waiting)], core=core)
    assert found.stages[0].waiting_on.since_ms == 1005.0


def test_the_rings_of_a_predecessor_do_not_speak_for_a_new_process(config):
    found = picture(config, samples=[sample(0, process_state=None)], core=core_report(config),
                    listed=processes(stage_process(0, pid=555)))  # fmt: skip
    assert found.stages[0].pid == 555 and found.stages[0].state == "loading"
    assert found.stages[0].sample_age_ms is None


def test_a_snapshot_survives_the_wire(config):
    found = picture(config, samples=[sample(0, timeline=[[3, 7, 1.0, 2.0]])], core=core_report(config))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=type(found)) == found


# --- evidence -----------------------------------------------------------------------------------------------


class Teller:
    """Feeds a tracker at chosen times (seconds)."""

    def __init__(self, config):
        self.config = config
        self.tracker = EvidenceTracker(config.stages, 10.0)

    def at(self, second, samples=(), core=None, listed=None, core_state=None, faults=None):
        now = int(second * S)
        sightings = {(one.index, 0): Sighting(one, now) for one in samples}
        return self.tracker.build(now, core, sightings, listed, core_state, faults=faults)


def test_a_stop_is_timed_from_its_first_to_its_newest_sample(config):
    teller = Teller(config)
    assert teller.at(1.0, [sample(0)]).stages[0].stopped_for_s is None
    assert teller.at(2.0, [sample(0, process_state="T")]).stages[0].stopped_for_s == 0.0
    assert teller.at(2.3, [sample(0, process_state="T")]).stages[0].stopped_for_s == pytest.approx(0.3)
    assert teller.at(2.4, [sample(0)]).stages[0].stopped_for_s is None
    assert teller.at(2.5, [sample(0, process_state="T")]).stages[0].stopped_for_s == 0.0


def test_who_is_stopped_at_every_call_and_moves_is_not_stopped(config):
    teller, traced = Teller(config), {"process_state": "t", "tracer": "strace (pid 77)"}
    for second in (1.0, 1.1, 1.2, 3.0):
        seen = teller.at(second, [sample(0, progress_age_ms=40.0, **traced)]).stages[0]
        assert (seen.stopped_for_s or 0.0) <= 0.04 and seen.tracer == "strace (pid 77)"
    held = teller.at(4.5, [sample(0, progress_age_ms=1500.0, **traced)]).stages[0]
    assert held.stopped_for_s == pytest.approx(1.5)


def test_a_look_with_a_debugger_is_no_new_start_and_a_long_stop_is(config):
    teller = Teller(config)
    stood = {"op": "forward", "op_age_ms": 9000.0, "progress_age_ms": 9000.0}
    for second, state in ((1.0, "S"), (1.2, "t"), (1.6, "t"), (1.7, "S")):
        seen = teller.at(second, [sample(0, process_state=state, **stood)]).stages[0]
    assert seen.progress_age_s == pytest.approx(9.0)
    for second, state in ((2.0, "t"), (3.5, "t"), (3.6, "S")):
        seen = teller.at(second, [sample(0, process_state=state, **stood)]).stages[0]
    assert seen.progress_age_s == pytest.approx(0.0)


def test_a_death_is_timed_from_the_first_who_saw_it_and_ends_with_a_new_process(config):
    teller, faults, status = Teller(config), FaultLog(), {"exit_code": -9, "detail": "killed by SIGKILL"}
    teller.at(1.0, [sample(0)], listed=processes(stage_process(0)))
    assert teller.at(2.0, [sample(0, process_state=None)]).stages[0].dead_for_s == 0.0
    faults.take(Exited(mono_ns=int(2.5 * S), role="stage", place=Place(0, 0), generation=1, pid=1000, **status))
    listed = processes(stage_process(0, **status))
    dead = teller.at(3.0, [sample(0, process_state=None)], listed=listed, faults=faults).stages[0]
    assert dead.dead_for_s == 1.0 and dead.exit_code == -9
    fresh = teller.at(4.0, [sample(0, process_state=None)], listed=processes(stage_process(0, pid=9))).stages[0]
    assert fresh.dead_for_s is None and fresh.pid == 9 and fresh.sample_age_s is None


def test_oom_kills_count_around_a_death_and_no_others(config):
    teller = Teller(config)
    assert teller.at(1.0, [sample(0, oom_kills=4)]).stages[0].oom_kills == 0
    assert teller.at(2.0, [sample(0, oom_kills=5)]).stages[0].oom_kills == 1
    assert teller.at(3.0, [sample(0, oom_kills=None)]).stages[0].oom_kills == 1
    assert teller.at(6.0, [sample(0, oom_kills=5)]).stages[0].oom_kills == 0, "that kill was another's"
    assert teller.at(7.0, [sample(0, oom_kills=6, process_state="Z")]).stages[0].oom_kills == 1
    assert teller.at(9.0, [sample(0, oom_kills=9, process_state="Z")]).stages[0].oom_kills == 1


@pytest.mark.parametrize("check", ["finite", "strict"])
def test_a_check_slows_steps_until_a_moment_after_it_is_off(config, check):
    teller, off = Teller(config), core_report(config)
    on = core_report(config)
    on.engine = msgspec.structs.replace(on.engine, checks=ChecksInfo(**{check: True}))
    assert not teller.at(1.0, core=off).slowed
    assert teller.at(2.0, core=on).slowed and teller.at(30.0, core=on).slowed
    assert teller.at(32.0, core=off).slowed and not teller.at(34.0, core=off).slowed


def test_a_phase_that_nobody_has_looked_at_for_long_is_not_known(config):
    teller = Teller(config)
    one = sample(0, phase="load")
    assert teller.at(1.0, [one]).stages[0].phase == "load"
    seen = {(0, 0): Sighting(one, 1 * S)}
    stale = teller.tracker.build(4 * S, None, seen, None, None).stages[0]
    assert stale.phase is None and stale.sample_age_s == 3.0


def test_pauses_for_stacks_are_in_no_age(config):
    teller, pauses = Teller(config), PauseHistory()
    teller.tracker.pauses["here"] = pauses
    core = core_report(config, stages=[view(0, oldest_unretired_age_ms=2600.0), view(1)])
    for second, total_s in ((1.0, 0.0), (7.0, 0.0), (7.4, 0.1), (9.5, 2.2), (10.0, 2.5)):
        pauses.note(int(second * S), int(total_s * S))
    stood = {"op_age_ms": 2600.0, "progress_age_ms": 2600.0, "tick_age_ms": 2600.0}
    healthy, stuck = teller.at(10.0, [sample(0, **stood), sample(1, op_age_ms=20_000.0)], core).stages
    assert [healthy.op_age_s, healthy.progress_age_s, healthy.tick_age_s, healthy.unretired_age_s] == [
        pytest.approx(0.2)
    ] * 4
    assert healthy.tick_stale_for_s is None
    assert stuck.op_age_s == pytest.approx(17.5), "a hang of its own goes on"
    assert teller.at(13.0, [sample(0, **stood)]).stages[0].op_age_s == pytest.approx(2.6), "a pause before it began"


def test_a_sum_of_pauses_that_falls_is_another_agents():
    pauses = PauseHistory()
    assert pauses.within_s(0) == 0.0
    for second, total_s in ((1.0, 5.0), (2.0, 6.0), (3.0, 0.5), (4.0, 0.5), (5.0, 0.5), (6.0, 1.5)):
        pauses.note(int(second * S), int(total_s * S))
    assert pauses.within_s(0) == pytest.approx(1.0)
    assert pauses.within_s(int(5.5 * S)) == pytest.approx(0.5) and pauses.within_s(int(6.5 * S)) == 0.0


def test_a_paused_stage_keeps_its_state_from_before():
    pauses = PtracePauses()
    pause_filter = PauseFilter(pauses)
    waits = {"process_state": "S", "main_state": "S", "wchan": "poll_schedule_timeout"}
    traced = {"process_state": "t", "main_state": "t", "wchan": "ptrace_stop"}
    assert pause_filter.apply(sample(1, **traced), 0) == sample(1, **traced), "another tracer has it"
    assert pause_filter.apply(sample(0, **waits), 0) == sample(0, **waits)
    begun_ns = time.monotonic_ns()
    with pauses.pause(sample(0).pid):
        assert pause_filter.apply(sample(0, **traced), begun_ns) == sample(0, **waits)
        assert pause_filter.apply(sample(0, **{**waits, "wchan": "ptrace_stop"}), begun_ns) == sample(0, **waits)
        stopped = sample(0, **{**waits, "process_state": "T"})
        assert pause_filter.apply(stopped, begun_ns) == stopped, "no look makes a T, so it counts"
        assert pause_filter.apply(sample(1, **traced), begun_ns) == sample(1, **traced)
    assert pause_filter.apply(sample(0, **traced), begun_ns) == stopped, "it was paused while /proc was read"
    assert pause_filter.apply(sample(0, **traced), time.monotonic_ns()) == sample(0, **traced)
    with pauses.pause(77):
        fresh = pause_filter.apply(sample(0, **{**traced, "pid": 77}), begun_ns)
        assert (fresh.process_state, fresh.wchan) == ("S", None), "a successor was never seen"


def test_a_card_is_known_while_its_stage_is_started_anew(config):
    teller = Teller(config)
    on = core_report(config, stages=[view(0, device_uuid="GPU-1"), view(1)])
    assert [one.card for one in teller.at(1.0, core=on).stages] == ["GPU-1", None]
    assert [one.card for one in teller.at(2.0, core=core_report(config)).stages] == ["GPU-1", None]


def test_retirement_anywhere_is_progress(config):
    teller = Teller(config)
    teller.at(1.0, core=core_report(config))
    assert teller.at(4.0, core=core_report(config)).since_retired_s == 3.0
    moved = core_report(config, stages=[view(0), view(1, retired_step=8)])
    assert teller.at(5.0, core=moved).since_retired_s == 0.0


def test_a_retirement_is_as_old_as_the_report_that_shows_it(config):
    teller = Teller(config)
    teller.at(1.0, core=core_report(config, mono_ns=1 * S))
    moved = core_report(config, mono_ns=int(4.5 * S), stages=[view(0), view(1, retired_step=8)])
    assert teller.at(5.0, core=moved).since_retired_s == 0.5
    teller.tracker.restart_clock(6 * S)
    again = core_report(config, mono_ns=int(5.5 * S), stages=[view(0), view(1, retired_step=9)])
    assert teller.at(6.5, core=again).since_retired_s == 0.5, "no earlier than the clock restarted"


def test_who_is_continued_gets_its_time_anew(config):
    teller, core = Teller(config), core_report(config)
    teller.at(1.0, [sample(0)], core=core)
    teller.at(2.0, [sample(0, process_state="T")], core=core)
    assert teller.at(9.0, [sample(0, process_state="T")], core=core).since_retired_s == 8.0
    assert teller.at(9.1, [sample(0)], core=core).since_retired_s == 0.0
    assert teller.at(12.1, [sample(0)], core=core).since_retired_s == pytest.approx(3.0)


def test_a_mapping_ages_with_its_sample_and_not_while_its_process_is_stopped(config):
    teller = Teller(config)
    core = core_report(config, stages=[view(0, mapping_blocks=100, block_bytes=1000), view(1)])
    seen = teller.at(1.0, [sample(0)], core=core).stages
    assert (seen[0].mapping_age_s, seen[0].mapping_bytes, seen[1].mapping_bytes) == (None, 100_000, 0)
    assert teller.at(2.0, [sample(0, mapping_ms=700.0)]).stages[0].mapping_age_s == pytest.approx(0.7)
    teller.at(3.0, [sample(0, mapping_ms=1700.0, process_state="T")])
    assert teller.at(9.0, [sample(0, mapping_ms=7700.0)]).stages[0].mapping_age_s == 0.0
    late = teller.tracker.build(int(9.5 * S), None, {(0, 0): Sighting(sample(0, mapping_ms=200.0), 9 * S)}, None, None)
    assert late.stages[0].mapping_age_s == pytest.approx(0.5 if late.stages[0].sample_age_s else 0.0)


def test_the_core_is_followed_by_its_process(config):
    teller = Teller(config)
    listed = processes(stage_process(0, role="core", stage=None, pid=42))
    assert teller.at(1.0, listed=listed, core_state=(42, "T")).core.stopped_for_s == 0.0
    assert teller.at(1.5, listed=listed, core_state=(42, "T")).core.stopped_for_s == 0.5
    core = core_report(config, mono_ns=1 * S)
    assert teller.at(1.7, core=core, listed=listed, core_state=(42, "t")).core.stopped_for_s == pytest.approx(0.7)
    fresh = core_report(config, mono_ns=int(1.9 * S))
    assert teller.at(1.9, core=fresh, listed=listed, core_state=(42, "t")).core.stopped_for_s == 0.0, "it reports on"
    seen = teller.at(2.0, core=core, listed=listed, core_state=(42, "S")).core
    assert seen.stopped_for_s is None and seen.report_age_s == 1.0 and seen.pid == 42
    assert teller.at(3.0, listed=listed, core_state=(42, None)).core.dead_for_s == 0.0


def test_the_newest_process_is_the_one_that_runs():
    listed = [stage_process(0, pid=1, exit_code=-9), stage_process(0, pid=2), stage_process(1, pid=3, exit_code=1)]
    assert newest_process(listed, "stage", (0, 0)).pid == 2
    assert newest_process(listed, "stage", (1, 0)).pid == 3
    assert newest_process(listed, "core") is None


# --- whom a signal may reach --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executor", "node", "reached"), [("local", "", True), ("ray", "here", True), ("ray", "n7", False)]
)
def test_a_pid_of_another_host_is_never_signalled(config, executor, node, reached):
    """On another host the pid is this very test's: continuing or clearing it away would hit the wrong process."""
    parallel = msgspec.structs.replace(config.profile.parallel, executor=executor)
    profile = msgspec.structs.replace(config.profile, parallel=parallel)
    collector = Collector(msgspec.structs.replace(config, profile=profile), EventLog(lambda event: None))
    process = subprocess.Popen(["sleep", "60"])
    try:
        start = process_start(process.pid)
        name = socket.gethostname() if node == "here" else node
        seen = [sample(0, pid=process.pid, process_start=start)]
        collector.take(AgentReport(mono_ns=1, node=name, stages=seen))
        collector.take(processes(stage_process(0, pid=process.pid)))
        assert (collector.processes.ranks(0) == {(0, 0): (process.pid, start)}) is reached
        assert (collector.processes.others() == {process.pid: start}) is reached
        collector.take(processes(stage_process(0, pid=process.pid, exit_code=0)))
        assert collector.processes.ranks(0) == {} and collector.processes.others() == {}
    finally:
        process.kill()
        process.wait()


def test_a_late_tick_counts_from_its_second_look_and_not_over_a_stop(config):
    teller = Teller(config)
    assert teller.at(1.0, [sample(0, tick_age_ms=1700.0)]).stages[0].tick_stale_for_s == 0.0
    seen = teller.at(1.2, [sample(0, tick_age_ms=1900.0)]).stages[0]
    assert (seen.tick_age_s, seen.tick_stale_for_s) == (1.9, pytest.approx(0.2))
    assert teller.at(1.4, [sample(0, tick_age_ms=20.0)]).stages[0].tick_stale_for_s is None
    teller.at(2.0, [sample(0, tick_age_ms=900.0, process_state="T")])
    seen = teller.at(9.0, [sample(0, tick_age_ms=7900.0)]).stages[0]
    assert (seen.tick_age_s, seen.tick_stale_for_s) == (0.0, None), "it has just been continued"


def test_two_late_ticks_are_not_one_that_is_seen_twice(config):
    """Without a free core the control thread is late again and again, and the agent looks seldom."""
    teller, late = Teller(config), {"progress_age_ms": 1500.0, "op": "receive", "op_peer": 0}
    for second in (1.0, 2.6, 4.3, 5.8):
        seen = teller.at(second, [sample(0, tick_age_ms=1400.0, **late)])
        assert seen.stages[0].tick_stale_for_s == 0.0, "it has ticked since the look before"
        assert [one for one in diagnose(seen) if one.cause == "gil_held"] == []
    seen = teller.at(6.2, [sample(0, tick_age_ms=1750.0, **late)])  # The agent was late with one of them.
    assert seen.stages[0].tick_stale_for_s == pytest.approx(0.4)
    assert [one.stage for one in diagnose(seen) if one.cause == "gil_held"] == [0]


def test_a_control_thread_without_a_core_does_not_wait_for_the_gil(config):
    """Its main thread waits for another stage meanwhile, and has no part in that."""
    teller = Teller(config)
    late = {"progress_age_ms": 9000.0, "op": "receive", "op_peer": 0}

    def held(second, age_ms, state):
        seen = teller.at(second, [sample(0, tick_age_ms=age_ms, control_state=state, **late)])
        return [one.stage for one in diagnose(seen) if one.cause == "gil_held"]

    assert [held(1.0 + 0.1 * k, 1100.0 + 100.0 * k, "R") for k in range(9)] == [[]] * 9
    assert held(1.9, 2000.0, "S") == [0] == held(2.0, 2100.0, "R"), "each turn that it asks for ends in a wait"
    held(2.1, 20.0, None)
    assert held(3.2, 1100.0, None) == [] != held(3.5, 1400.0, None), "its state is not known"


@pytest.mark.parametrize("state", ["paused", "draining", "resizing", "degraded", "loading"])
def test_running_requests_without_a_step_count_only_while_the_engine_serves(config, state):
    teller, running = Teller(config), Queues(running=3)

    def unscheduled(second, **changes):
        report = core_report(config, mono_ns=int(second * S), **{"queues": running} | changes)
        return teller.at(second, core=report, core_state=(7, "S")).core.unscheduled_for_s

    quiet = msgspec.structs.replace(core_report(config).engine, state=state)
    assert unscheduled(1.0, engine=quiet) is None and unscheduled(5.0, engine=quiet) is None
    assert unscheduled(6.0) == 0.0 and unscheduled(10.0) == pytest.approx(4.0)
    assert unscheduled(10.1, steps_in_flight=[9]) is None and unscheduled(10.2) == 0.0
    assert unscheduled(10.3, queues=Queues()) is None


def test_what_a_stage_says_of_its_own_end_and_what_checks_found_are_evidence(config):
    teller = Teller(config)
    finding = Finding(stage=1, cause="non_finite", summary="nan", since_s=1.0)
    report, faults = core_report(config, findings=[finding]), FaultLog()
    faults.take(Lost(mono_ns=S, place=Place(0, 0), generation=1, words="ValueError: x"))
    seen = teller.at(2.5, core=report, faults=faults)
    assert (seen.stages[0].lost, seen.stages[0].lost_for_s) == ("ValueError: x", 1.5)
    assert seen.stages[1].lost == "" and seen.findings == (finding,)


def test_a_rule_that_trips_is_told_once_and_does_not_end_the_engine(config, monkeypatch, caplog):
    events = []
    collector = Collector(config, EventLog(events.append))
    shown = set()
    commands = SimpleNamespace(stopping=False, core_lost=lambda missing: None)
    quiet = SimpleNamespace(look=lambda *_: None, stacks={}, kept=None)
    gateway = SimpleNamespace(
        _take_report=lambda: None, _collector=collector, _consoles=SimpleNamespace(commands=commands), _probe=quiet,
        _recorder=quiet, _incidents=quiet, _refresh=shown, _core_was_there=True,
        _succession=SimpleNamespace(core_away=False), _parent_memory=quiet,
    )  # fmt: skip
    gateway._diagnose = lambda: Gateway._diagnose(gateway)
    gateway._guarded = lambda diagnose: Gateway._guarded(gateway, diagnose)

    def trips(case):
        raise KeyError(f"stage {1 + 1}")

    with monkeypatch.context() as patch:
        patch.setattr("ppengine.diagnosis.RULES", (trips,))
        for _ in range(3):
            Gateway._judge(gateway, time.monotonic())
        (verdict,) = collector.snapshot(1).verdicts
    assert (verdict.stage, verdict.cause) == (None, "undetermined") and verdict.since_s > 0
    assert verdict.summary == "the diagnosis failed: KeyError: 'stage 2'"
    assert 'raise KeyError(f"stage {1 + 1}")' in verdict.evidence[0]
    assert [event.kind for event in events] == ["verdict.raised"] and shown
    assert caplog.text.count("Traceback") == 1
    Gateway._judge(gateway, time.monotonic())
    assert [event.kind for event in events] == ["verdict.raised", "verdict.cleared"]


@pytest.mark.parametrize(("pid", "name"), [(1000, "python3"), (7, "")])
def test_names_of_processes_are_shown_if_the_stage_itself_is_among_them(config, pid, name):
    core = core_report(config)
    core.stages[0].device_uuid = "GPU-a"
    listed = [GpuProcess(pid=pid, name="python3"), GpuProcess(pid=4242, name="python3", bytes=5)]
    card = GpuInfo(uuid="GPU-a", age_ms=1.0, processes=listed)
    gpu = picture(config, core=core, gpus={"GPU-a": (card, 10 * S)}).stages[0].gpu
    assert gpu.processes == [GpuProcess(pid=pid, name=name), GpuProcess(pid=4242, name=name, bytes=5)]


def test_a_straggler_on_a_card_that_another_process_uses_is_judged_with_it(config):
    events = []
    collector = Collector(config, EventLog(events.append))
    slow = PaceSample(step_ms=18.0, baseline_ms=10.0, slow_ms=9000.0)
    core = core_report(config)
    for stage in core.stages:
        stage.device_uuid = "GPU-a"
    collector.take(core)
    listed = [stage_process(0), stage_process(1)]
    collector.take(processes(*listed))
    neighbour = GpuProcess(pid=2**30, name="python3 train.py", sm=0.6)
    ours = [GpuProcess(pid=1000, sm=0.2), GpuProcess(pid=1001, sm=0.15)]
    for index, others in enumerate(([neighbour], [])):
        card = GpuInfo(uuid="GPU-a", age_ms=100.0, processes=[*ours, *others])
        samples = [sample(0, pace=slow), sample(1, pace=slow)]
        now_ns, node = time.monotonic_ns(), socket.gethostname()
        collector.take(AgentReport(mono_ns=now_ns, node=node, stages=samples, gpus=[card]))
        collector.judge(False)
        named = [f"stage {k} is 1.8x slower than it was: python3 train.py (pid {2**30}) uses 60 % of its card"
                 for k in range(2)]  # fmt: skip
        assert [verdict.summary for verdict in collector.verdicts] == (named if index == 0 else [])


def test_a_process_that_was_held_since_its_turn_began_judges_nothing(config):
    events = []
    collector = Collector(config, EventLog(events.append))
    collector.take(core_report(config, mono_ns=time.monotonic_ns() - int(9e9)))
    assert collector.judge(False, by_ns=time.monotonic_ns() - 1) is False and not collector.verdicts
    assert collector.judge(False, by_ns=time.monotonic_ns() + int(60e9)) is True
    assert [verdict.cause for verdict in collector.verdicts] == ["core"]


def test_a_gateway_whose_diagnosis_raises_still_clears_away_when_it_leaves(config, monkeypatch):
    collector = Collector(config, EventLog(lambda event: None))
    published, cleared, lost, kept = [], [], [], []
    nothing = SimpleNamespace(close=lambda **_: None, newest=None, write=kept.append)
    quiet = SimpleNamespace(look=lambda: None, words=lambda: "")
    consoles = SimpleNamespace(
        commands=SimpleNamespace(stopping=True, core_lost=lost.append), sessions=SimpleNamespace(count=lambda now: 0)
    )
    gateway = SimpleNamespace(
        _on_collect=lambda: None, _take_report=lambda: None, _collector=collector, _consoles=consoles,
        _events=EventLog(lambda event: None), _publisher=SimpleNamespace(snapshot=lambda *last: published.append(last)),
        _engine=SimpleNamespace(faults=None), _sockets=nothing, _config=config, _incidents=nothing, _history=nothing,
        _probe=SimpleNamespace(stacks={}), _parent=7, _parent_memory=quiet, _journal=nothing, _access=nothing,
        _connections=nothing,
    )  # fmt: skip
    gateway._diagnose = lambda: Gateway._diagnose(gateway)
    gateway._guarded = lambda diagnose: Gateway._guarded(gateway, diagnose)
    gateway._publish_end = lambda why: Gateway._publish_end(gateway, why)

    def trips(case):
        raise KeyError("stage 2")

    monkeypatch.setattr("ppengine.diagnosis.RULES", (trips,))
    monkeypatch.setattr(
        "ppengine.gateway.departure.clear_away",
        lambda *orphans, keep_files: cleared.append((*orphans, keep_files)) or [],
    )
    Gateway.leave(gateway, orphaned=True)
    assert lost == ["the engine stops"] and cleared == [(config.id, {}, False)]
    ((last, topics),) = published
    assert last.engine.state == "stopped" and len(topics) == 3 and kept == [last]


def test_a_core_is_held_since_its_long_turns_take_half_of_the_time(config):
    tracker, listed = EvidenceTracker(2, 10.0), processes(ProcessInfo(role="core", stage=None, rank=None, pid=7))

    def core(at_s, held_s):
        held = HeldTurns(held_s=held_s, ran_s=0.0, window_s=4.0, turns=3, longest_s=0.5)
        report = core_report(config, mono_ns=int(at_s * S), held=held)
        return tracker.build(int(at_s * S), report, {}, listed, None).core

    assert core(10.0, 1.9).held_for_s == 0.0
    assert core(11.0, 2.1).held_for_s == 0.0
    assert core(12.5, 4.0).held_for_s == 1.5
    assert core(13.0, 1.0).held_for_s == 0.0
    assert core(14.0, 3.0).held_for_s == 0.0
