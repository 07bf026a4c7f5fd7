"""Ends of processes, silence of the core, findings, slowness: every cause, and what only looks like it."""

import msgspec
import pytest
from diagnosis_world import PLACES, Chance, evidence, healthy, pipeline_held_at, stuck, with_stage
from monitor_helpers import stage
from ppengine.diagnosis import build, diagnose
from ppengine.diagnosis.evidence import CoreEvidence, Stack
from ppengine.diagnosis.neighbours import with_neighbours
from ppengine.diagnosis.wait_graph import main
from ppengine.protocol.gpu import GpuInfo, GpuProcess
from ppengine.protocol.reports import UNKNOWN_STATUS, Finding, HeldTurns
from ppengine.protocol.stage_samples import CpuShares, EdgeSample, Message, PaceSample, StarvedSample


def roots(verdicts):
    return [(verdict.stage, verdict.cause) for verdict in verdicts if verdict.root]


# --- ends ---------------------------------------------------------------------------------------------------

ENDS = [
    ({"exit_code": -9, "oom_kills": 1}, "killed_oom"), ({"exit_code": -9, "oom_kills": 0}, "dead"),
    ({"exit_code": -9, "oom_kills": None}, "dead"), ({"exit_code": -15}, "dead"), ({"exit_code": 0}, "dead"),
    ({"exit_code": 1}, "dead"), ({"exit_code": 1, "exit_detail": "exit code 1"}, "dead"),
    ({"exit_code": -11, "exit_detail": "killed by SIGSEGV"}, "crashed"), ({"exit_code": -6}, "crashed"),
    ({"exit_code": -7}, "crashed"), ({"exit_code": 1, "exit_detail": "KeyError: 'w'"}, "crashed"),
    ({"exit_code": 1, "exit_detail": "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"}, "out_of_memory"),
    ({"exit_code": 8, "exit_detail": "does not fit: weights 9M + activations 1M"}, "out_of_memory"),
    ({"exit_code": 1, "exit_detail": "DefaultCPUAllocator: can't allocate memory: you tried"}, "out_of_memory"),
    ({"exit_code": None}, "dead"),
]  # fmt: skip


@pytest.mark.parametrize(("count", "k"), PLACES)
@pytest.mark.parametrize(("end", "cause"), ENDS)
def test_how_a_process_ended(count, k, end, cause):
    stages = with_stage(pipeline_held_at(count, k, 0.6), k, process_state="Z", dead_for_s=0.5, **end)
    verdicts = diagnose(stuck(stages, 0.6))
    assert roots(verdicts) == [(k, cause)]
    assert {v.cause for v in verdicts if not v.root} <= {"starved", "blocked"} and len(verdicts) == count


@pytest.mark.parametrize(("count", "k"), PLACES)
@pytest.mark.parametrize(
    ("words", "cause"),
    [("ValueError: no slot 7", "crashed"), ("MemoryError: cannot allocate 9 GiB", "out_of_memory")],
)
def test_a_stage_that_says_that_it_cannot_go_on_and_lives(count, k, words, cause):
    stages = with_stage(pipeline_held_at(count, k, 0.6), k, lost=words, lost_for_s=0.1, op="idle")
    root = diagnose(stuck(stages, 0.6))[0]
    assert (root.stage, root.cause) == (k, cause) and words in root.summary and f"last words: {words}" in root.evidence


ORDER = [
    Finding(stage=1, cause="stream_order", summary="stage 1: kv-load reads x", since_s=1.3, evidence=["wait missing"]),
    Finding(
        stage=1, cause="stream_owner", summary="stage 1: thread step loop launches on stream kv-load",
        since_s=1.3, evidence=["made current at a.py:1", "launched at b.py:2"],
    ),
]  # fmt: skip


def test_a_crash_is_told_with_what_broke_the_order_of_streams_before_it():
    words = "AcceleratorError: CUDA error: an illegal memory access was encountered"
    crashed = with_stage(healthy(2), 1, lost=words, lost_for_s=0.2, pid=7, successor=8, findings=tuple(ORDER))
    root = only(diagnose(evidence(crashed)))
    assert (root.stage, root.cause, root.since_s) == (1, "stream_owner", 0.2)
    assert root.summary == "stage 1 crashed: thread step loop launches on stream kv-load"
    assert {"launched at b.py:2", "also stream_order: stage 1: kv-load reads x", f"last words: {words}"} <= {
        *root.evidence
    }
    assert "a stream of its own" in root.suggest and "ppconsole logs --stage 1 (pid 8 takes its place" in root.suggest


@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ({"exit_code": -9}, "dead"),
        ({"exit_code": -9, "oom_kills": 1}, "killed_oom"),
        ({"exit_code": 1, "exit_detail": "KeyError: 'w'"}, "crashed"),
        ({"exit_code": 1, "exit_detail": "RuntimeError: CUDA out of memory"}, "out_of_memory"),
    ],
)
def test_who_ends_otherwise_does_not_die_of_what_was_found_before(end, cause):
    dead = with_stage(healthy(2), 1, process_state="Z", dead_for_s=0.5, findings=tuple(ORDER), **end)
    assert roots(diagnose(evidence(dead))) == [(1, cause)]


def only(verdicts):
    (root,) = [verdict for verdict in verdicts if verdict.root]
    return root


@pytest.mark.parametrize(("count", "k"), PLACES)
@pytest.mark.parametrize(
    ("kills", "words", "cause"),
    [
        (None, "Ray: its worker process has died.", "dead"),
        (0, "Ray: its worker process has died.", "dead"),
        (1, "Ray: its worker process has died.", "killed_oom"),
        (None, "Ray: the task was killed: out of memory", "out_of_memory"),
    ],
)
def test_a_death_of_which_nobody_has_the_status_is_no_crash(count, k, kills, words, cause):
    gone = {"exit_code": UNKNOWN_STATUS, "exit_detail": words, "dead_for_s": 0.6, "oom_kills": kills}
    root = only(diagnose(evidence(with_stage(healthy(count), k, **gone))))
    assert (root.stage, root.cause) == (k, cause)
    assert "its exit status is unknown" in root.summary


def test_who_blames_a_peer_waits_for_the_peers_own_end():
    lost = {"lost": "lost stage 1: it closed the connection", "op": "idle"}
    early = with_stage(pipeline_held_at(3, 1, 0.6), 0, lost_for_s=0.1, **lost)
    assert diagnose(stuck(early, 0.6)) == [], "the end of stage 1 has not been seen yet"
    dead = with_stage(early, 1, exit_code=-9, dead_for_s=0.05, process_state="Z", oom_kills=0)
    verdicts = diagnose(stuck(dead, 0.6))
    assert roots(verdicts) == [(1, "dead")]
    assert {v.stage: v.cause for v in verdicts[1:]} == {0: "starved", 2: "starved"}
    assert "after stage 1 was gone" in next(v for v in verdicts if v.stage == 0).summary
    alone = with_stage(early, 0, lost_for_s=2.5)
    assert roots(diagnose(stuck(alone, 2.6)))[0] == (0, "link"), "stage 1 lives: the connection is what broke"


def test_an_end_while_the_engine_stops_is_none():
    stages = with_stage(healthy(2), 1, lost="lost stage 0: it closed the connection", lost_for_s=9.0)
    stages = with_stage(stages, 0, exit_code=0, dead_for_s=9.0)
    assert diagnose(evidence(stages, stopping=True)) == []


# --- the core -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("core", "words"),
    [
        ({"exit_code": -9, "dead_for_s": 0.1}, "was killed by SIGKILL"),
        ({"stopped_for_s": 0.3}, "stopped by a signal"), ({"report_age_s": 2.5}, "has not reported for 2.5s"),
        ({"unscheduled_for_s": 3.2, "running": 4}, "schedules nothing for 4 running requests"),
    ],
)  # fmt: skip
def test_the_core(core, words):
    root, *others = diagnose(stuck(pipeline_held_at(3, 1), core=CoreEvidence(pid=7, **core)))
    assert (root.stage, root.cause) == (None, "core") and words in root.summary
    assert all(not verdict.root for verdict in others)


@pytest.mark.parametrize("core", [{"report_age_s": 2.5}, {"unscheduled_for_s": 3.2, "running": 4}])
def test_where_a_core_stands_that_nobody_has_stopped(core):
    where = "schedule ppengine/scheduler/scheduler.py:136"
    stack = Stack(pid=1234567, main=("poll (libzmq.so)", where, "run ppengine/core/__main__.py:1"))
    seen = CoreEvidence(pid=1234567, stack=stack, **core)
    root = diagnose(stuck(pipeline_held_at(3, 1), core=seen))[0]
    assert root.summary.endswith(", at schedule scheduler.py:136") and root.suggest == "ppconsole stacks --core"
    assert any(where in line for line in root.evidence) and "1234567" in root.evidence[0]
    other = msgspec.structs.replace(seen, pid=8)
    assert ", at " not in diagnose(stuck(pipeline_held_at(3, 1), core=other))[0].summary, "another process's stack"


def long_turns(**changes):
    """Return the long turns of a core that waits for a service, half a second each."""
    frames = ["poll sugar/poll.py:106", "ask ppengine/core/tiers/finder.py:35", "run ppengine/core/__main__.py:1"]
    held = HeldTurns(held_s=3.2, ran_s=0.1, window_s=4.0, turns=7, longest_s=0.5, frames=frames)
    return msgspec.structs.replace(held, **changes)


def test_a_core_that_is_held_in_its_turns():
    core = CoreEvidence(pid=7, report_age_s=0.4, held=long_turns(), held_for_s=1.5)
    root = diagnose(evidence(healthy(2), core=core))[0]
    assert (root.stage, root.cause, root.since_s, root.suggest) == (None, "core", 1.5, "ppconsole stacks --core")
    assert root.summary == "the engine core waits in its turns for 80 % of the time, at ask finder.py:35"
    text = "\n".join(root.evidence)
    assert "7 long turns took 3.2s of the last 4.0s, the longest 0.5s" in text
    assert "main thread at poll sugar/poll.py:106 < ask ppengine/core/tiers/finder.py:35 < " in text
    busy = msgspec.structs.replace(core, held=long_turns(ran_s=3.0, frames=[]))
    assert "the engine core (pid 7) computes in its turns for 80 % of the time" in roots_text(busy)


def roots_text(core):
    """Return the summaries of all verdicts."""
    return "\n".join(verdict.summary for verdict in diagnose(evidence(healthy(2), core=core)))


@pytest.mark.parametrize("core", [
    {"unscheduled_for_s": 2.0}, {"report_age_s": 1.0}, {"stopped_for_s": 0.1}, {}, {"held": long_turns(held_s=1.9)},
])  # fmt: skip
def test_a_core_that_is_only_late(core):
    assert diagnose(evidence(healthy(2), core=CoreEvidence(pid=7, **core))) == []


def test_stages_without_work_starve_by_a_core_that_is_stopped():
    held = {"unretired_age_s": 3.0, "op_age_s": 3.0}
    stages = [stage(0, op_age_s=3.0), stage(1, op="receive", op_step=8, op_peer=0, **held)]
    root, *others = diagnose(stuck(stages, 3.0, core=CoreEvidence(pid=7, stopped_for_s=3.0)))
    assert root.cause == "core"
    assert {v.stage: v.cause for v in others} == {0: "starved", 1: "starved"}
    assert "by the engine core" in others[0].summary


def test_a_silent_head_of_ray_is_a_root_and_explains_no_stage():
    words = "Ray's head at 10.0.0.1:6379 has not answered since 12:00:01"
    (root,) = diagnose(evidence(healthy(2), silent_head=(words, 3.0)))
    assert (root.stage, root.cause, root.summary, root.since_s) == (None, "link", words, 3.0)
    assert {(None, "link"), (1, "self_stuck")} == set(
        roots(diagnose(stuck(pipeline_held_at(3, 1), silent_head=(words, 9.0))))
    )
    assert diagnose(evidence(healthy(2), silent_head=(words, 3.0), stopping=True)) == []


# --- findings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["stream_order", "stream_owner", "stream_stuck", "non_finite", "mismatch"])
@pytest.mark.parametrize("where", [0, 1, None])
def test_a_finding_is_a_root_with_its_evidence(cause, where):
    finding = Finding(stage=where, cause=cause, summary=f"{cause} told", since_s=3.0, evidence=["call site a.py:1"])
    (root,) = diagnose(evidence(healthy(2), findings=(finding,)))
    assert (root.stage, root.cause, root.summary, root.root) == (where, cause, f"{cause} told", True)
    assert root.evidence == ["call site a.py:1"] and root.suggest


def test_what_was_computed_with_a_value_that_is_not_finite_is_to_be_dropped():
    finding = Finding(stage=1, cause="non_finite", summary="nan", since_s=1.0)
    (verdict,) = diagnose(evidence(healthy(2), findings=(finding,)))
    assert verdict.suggest.startswith("ppconsole restart-stage 1 (") and "ppconsole logs --stage 1" in verdict.suggest


def test_of_several_findings_the_one_that_explains_the_others_is_told():
    findings = tuple(
        Finding(stage=1, cause=cause, summary=f"{cause} x", since_s=age, evidence=[])
        for cause, age in (("non_finite", 9.0), ("stream_order", 1.0), ("stream_owner", 2.0))
    )
    (root,) = diagnose(evidence(healthy(2), findings=findings))
    assert root.cause == "stream_owner" and "also non_finite: non_finite x" in root.evidence


def test_a_finding_explains_why_its_stage_stands_and_a_death_comes_before_it():
    finding = Finding(stage=1, cause="stream_stuck", summary="stream copy stands", since_s=3.0)
    assert roots(diagnose(stuck(pipeline_held_at(3, 1), findings=(finding,)))) == [(1, "stream_stuck")]
    dead = with_stage(pipeline_held_at(3, 1), 1, exit_code=-9, dead_for_s=1.0, oom_kills=0)
    assert roots(diagnose(stuck(dead, findings=(finding,)))) == [(1, "dead")]


@pytest.mark.parametrize("where", [0, 1, None])
@pytest.mark.parametrize("cause", ["stream_order", "non_finite", "mismatch"])
def test_a_finding_of_a_while_ago_hides_no_hang(cause, where):
    finding = Finding(stage=where, cause=cause, summary=f"{cause} told", since_s=3600.0)
    verdicts = diagnose(stuck(pipeline_held_at(3, 1), findings=(finding,)))
    assert (1, "self_stuck") in roots(verdicts)
    assert not any("starved by the engine core" in verdict.summary for verdict in verdicts)
    assert where == 1 or (where, cause) in roots(verdicts)
    idle = diagnose(evidence(with_stage(healthy(3), 1, op="idle", op_age_s=90.0), findings=(finding,)))
    assert [(verdict.stage, verdict.cause) for verdict in idle] == [(where, cause)], "no stage is starved by nobody"


@pytest.mark.parametrize("oom_kills", [0, 1])
def test_who_is_started_anew_is_not_to_be_started_anew(oom_kills):
    dead = {"exit_code": -9, "dead_for_s": 30.0, "oom_kills": oom_kills}
    alone = diagnose(stuck(with_stage(pipeline_held_at(2, 1), 1, **dead)))[0]
    followed = diagnose(stuck(with_stage(pipeline_held_at(2, 1), 1, **dead, successor=42, successor_phase="load")))[0]
    if oom_kills:
        assert alone.suggest == followed.suggest and "less memory" in alone.suggest
    else:
        assert alone.suggest.startswith("ppconsole restart-stage 1")
        assert followed.suggest == "ppconsole logs --stage 1 (pid 42 takes its place in phase load)"


# --- slowness -----------------------------------------------------------------------------------------------


def pace(step_ms=16.0, slow_s=11.0, throttled=None, age_s=0.5):
    return PaceSample(step_ms=step_ms, baseline_ms=10.0, slow_ms=slow_s * 1e3, throttled=throttled, age_ms=age_s * 1e3)


@pytest.mark.parametrize(("count", "k"), PLACES)
@pytest.mark.parametrize("throttled", [None, 0.0, 0.4])
def test_a_straggler(count, k, throttled):
    stages = [msgspec.structs.replace(one, pace=pace(10.5, 0.0)) for one in healthy(count)]
    (root,) = diagnose(evidence(with_stage(stages, k, pace=pace(throttled=throttled))))
    assert (root.stage, root.cause) == (k, "straggler") and f"stage {k} is 1.6x slower" in root.summary
    assert ("cpu quota holds it back" in root.summary) == (throttled == 0.4)
    assert "own time of a step 16.0 ms; like steps took 10.0 ms here before" in root.evidence


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_a_straggler_that_gets_no_core(count, k):
    held = StarvedSample(share=0.35, for_ms=4200.0, scheduling="may use processors 3, nice value 19")
    stages = [msgspec.structs.replace(one, pace=pace(14.5)) for one in healthy(count)]
    (root,) = diagnose(evidence(with_stage(stages, k, starved=held)))
    assert (root.stage, root.cause) == (k, "straggler") and "waits for a core while others idle" in root.summary
    assert any(line.startswith("its main thread could run and had no core for at least 35 %") for line in root.evidence)
    assert "its main thread may use processors 3, nice value 19" in root.evidence
    short = with_stage(stages, k, starved=msgspec.structs.replace(held, for_ms=3900.0))
    assert not any("core" in root.summary for root in diagnose(evidence(short)))
    for idle in (None, pace(14.5, age_s=60.0)):
        calm = [msgspec.structs.replace(one, pace=idle) for one in healthy(count)]
        assert not roots(diagnose(evidence(with_stage(calm, k, starved=held)))), "it has nothing to do"
    (root,) = diagnose(evidence(with_stage(calm, k, starved=held, unretired_age_s=0.1, unretired_step=9)))
    assert root.cause == "straggler", "its step may be the first for a minute"


def test_twice_the_usual_time_is_named_sooner():
    for step_ms, slow_s, named in ((16.0, 5.0, False), (16.0, 6.0, True), (20.5, 4.6, True), (20.5, 4.4, False)):
        found = roots(diagnose(evidence(with_stage(healthy(2), 1, pace=pace(step_ms, slow_s)))))
        assert found == ([(1, "straggler")] if named else [])


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(("count", "k"), PLACES)
def test_a_straggler_whose_card_another_process_uses(count, k, alike):
    others = (
        GpuProcess(pid=4242, name="python3 train.py", bytes=3 * 2**30, sm=0.6), GpuProcess(pid=7, sm=0.12),
    )  # fmt: skip
    stages = [msgspec.structs.replace(one, pace=pace(18.0) if alike else pace(10.5, 0.0)) for one in healthy(count)]
    stages = with_stage(stages, k, pace=pace(18.0), neighbours=others, sm=0.3)
    (root,) = diagnose(evidence(stages))
    assert (root.stage, root.cause) == (k, "straggler")
    assert root.summary == f"stage {k} is 1.8x slower than it was: python3 train.py (pid 4242) uses 60 % of its card"
    assert root.evidence[2:5] == [
        "python3 train.py (pid 4242) uses 60 % of the card's SMs, holds 3.0 GiB",
        "a process that is not visible here (pid 7) uses 12 % of the card's SMs",
        "this stage uses 30 %",
    ]
    assert root.suggest == "move pid 4242 to another card"
    capped = with_stage(stages, k, pace=pace(18.0, throttled=0.5))
    assert "cpu quota holds it back" in diagnose(evidence(capped))[0].summary, "what is measured in its own time"


def card(*processes, age_ms=100.0):
    return {"GPU-1": (GpuInfo(uuid="GPU-1", age_ms=age_ms, processes=list(processes)), 0)}


def seen(gpus, at, now_ns=0, stages=None):
    """Return a stage with its neighbours. `stages`: bytes by pid of the engine's stages on the card."""
    cards = {"GPU-1": {1000: 20, 1001: 50} if stages is None else stages}
    return with_neighbours(now_ns, at, gpus, cards, {1000, 1001, 1002}.__contains__)


def test_neighbours_are_others_that_compute_on_the_card():
    one = stage(0, card="GPU-1")
    mine, shares, shadow = (GpuProcess(pid=1000 + index, sm=0.4, bytes=1) for index in range(3))
    other, more, idle = GpuProcess(pid=5, sm=0.1), GpuProcess(pid=6, sm=0.3), GpuProcess(pid=8, sm=0.09)
    found = seen(card(other, mine, more, shares, idle, shadow), one)
    assert found.neighbours == (more, other), "no process of the engine, however much it computes"
    assert found.sm == 0.4
    assert seen(card(other, mine, shares), stage(0)) == stage(0) and seen({}, one) is one
    assert seen(card(other, mine, shares, age_ms=5000.0), one) is one
    assert seen(card(other, mine, shares), one, now_ns=5 * 10**9) is one
    assert seen(card(GpuProcess(pid=5), mine, shares), one).neighbours == (), "use that is not known names none"
    assert seen(card(other, mine), one).neighbours == (), "the other stage is not listed, and may be any of them"


def test_stages_that_the_driver_numbers_otherwise_are_known_by_their_size():
    one = stage(0, card="GPU-1")
    sizes = {31: 52, 32: 48, 33: 21, 34: 19}
    listed = [GpuProcess(pid=pid, name="wrong", bytes=size, sm=0.5) for pid, size in sizes.items()]
    # 51 is nearest to the stage of 50, and 21 or 19 to that of 20.
    left = seen(card(listed[0], listed[2], GpuProcess(pid=35, name="wrong", bytes=3, sm=0.2)), one).neighbours
    assert left == (GpuProcess(pid=35, bytes=3, sm=0.2),), "its name is that of another process here"
    assert len(seen(card(*listed), one).neighbours) == 2
    assert seen(card(*listed[1:3]), one).neighbours == (), "as many as there are stages"
    assert seen(card(listed[0]), one).neighbours == ()
    assert seen(card(*listed), one, stages={1000: 20, 1001: None}).neighbours == (), "a size that is not known"


@pytest.mark.parametrize("changes", [{"slow_s": 5.0}, {"slow_s": 0.0}, {"age_s": 9.0}])
def test_slow_for_a_few_seconds_or_some_time_ago(changes):
    stages = with_stage(healthy(2), 1, pace=pace(**changes))
    assert diagnose(evidence(stages)) == []


def test_when_all_are_slower_the_host_is_and_no_stage():
    stages = [msgspec.structs.replace(one, pace=pace()) for one in healthy(3)]
    assert diagnose(evidence(stages)) == []
    capped = with_stage(stages, 1, pace=pace(throttled=0.5))
    assert roots(diagnose(evidence(capped))) == [(1, "straggler")]


def test_one_that_stands_out_is_told_and_who_gets_fewer_steps_for_it_is_not():
    stages = [msgspec.structs.replace(one, pace=pace(18.0)) for one in healthy(3)]
    stages = with_stage(stages, 1, pace=pace(50.0))
    assert roots(diagnose(evidence(stages))) == [(1, "straggler")]
    stages = with_stage(stages, 1, pace=pace(30.0))
    assert diagnose(evidence(stages)) == [], "all are slower, and none by much more than another"


def test_a_check_that_slows_all_steps_makes_no_straggler():
    stages = with_stage(healthy(2), 0, pace=pace(60.0))
    assert roots(diagnose(evidence(stages))) == [(0, "straggler")]
    assert diagnose(evidence(stages, slowed=True)) == []


def test_slowness_is_not_told_beside_a_fault():
    stages = with_stage(pipeline_held_at(3, 1), 0, pace=pace())
    assert roots(diagnose(stuck(stages))) == [(1, "self_stuck")]


# --- whatever comes: a root waits for nobody ----------------------------------------------------------------

SEEDS = 1500
OWES = {"unretired_age_s": 6.0, "op": "send", "op_peer": 2, "op_age_s": 6.0, "retired_step": None}
LOADED = {"phase": "load", "phase_age_s": 957.0, "sample_age_s": 9.0, "op": None, "unretired_age_s": 0.8}
"""A stage that waits for `OWES`, by an old sample of its load."""
LOADS = {"phase": "load", "phase_age_s": 901.0, "op": "receive", "op_peer": 1, "op_age_s": 3.0}


def any_edge(chance):
    messages = [
        Message(
            chance.randint(1, 9), chance.randint(1, 9), chance.choice([64, 128]), 5, chance.randint(0, 2),
            chance.uniform(0, 9000),
        )
        for _ in range(chance.randint(0, 4))
    ]  # fmt: skip
    kind = chance.choice(["send", "receive"])
    return EdgeSample(kind=kind, peer=chance.randint(0, 3), generation=chance.randint(1, 2), messages=tuple(messages))


def any_cpu(chance):
    return CpuShares(
        user=chance.uniform(0, 4), system=chance.random(), main_user=chance.random(), main_system=chance.random(),
        main_waited=chance.maybe(chance.uniform(0, 1.2)),
    )  # fmt: skip


def any_stage(chance):
    """Return changes of a stage. Each may be left out, so that the others meet a stage that is well, or only waits."""
    held = {
        "unretired_age_s": 6.0, "unretired_tokens": 1, "op": chance.choice(["receive", "room", "forward", "send"]),
        "op_age_s": 6.0, "op_step": 8, "op_peer": chance.randint(0, 3), "progress_age_s": 6.0, "process_state": "S",
        "wchan": "poll_schedule_timeout", "phase": "serving", "sample_age_s": 0.05, "exit_code": None,
    }  # fmt: skip
    changes = {
        "exit_code": chance.choice([None, None, None, -11, -9, 0, 1]), "dead_for_s": chance.age(100),
        "exit_detail": chance.choice(["", "ValueError: x", "lost stage 1: it closed the connection"]),
        "lost": chance.choice(["", "", "", "ValueError: x", "lost stage 0: it closed the connection"]),
        "lost_for_s": chance.uniform(0, 5), "process_state": chance.choice(["R", "S", "D", "T", "Z", None]),
        "stopped_for_s": chance.age(3), "phase": chance.choice(["serving", "serving", "serving", "load", None]),
        "phase_age_s": chance.uniform(0, 1000), "sample_age_s": chance.age(3),
        "op": chance.choice(
            [None, "idle", "receive", "send", "room", "forward", "token_return", "collective", "step"]
        ),
        "op_age_s": chance.age(100), "op_step": chance.randint(1, 9), "op_peer": chance.maybe(chance.randint(0, 4)),
        "outbox": chance.choice([None, 0, 1, 2]),
        "edges": tuple(any_edge(chance) for _ in range(chance.randint(0, 3))), "cpu": chance.maybe(any_cpu(chance)),
        "wchan": chance.choice([None, "", "futex_do_wait", "do_poll", "hrtimer_nanosleep"]),
        "tick_age_s": chance.age(100), "tick_stale_for_s": chance.age(100), "progress_age_s": chance.age(100),
        "finished_step": chance.maybe(chance.randint(0, 9)), "retired_step": chance.maybe(chance.randint(0, 9)),
        "unretired_age_s": chance.age(100), "unretired_tokens": chance.randint(0, 99),
        "pace": chance.maybe(pace(chance.uniform(5, 30), chance.uniform(0, 30))),
    }  # fmt: skip
    share = chance.choice((0.1, 0.2, 0.5, 1.0))
    changes = {name: value for name, value in changes.items() if chance.random() < share}
    return changes | held if chance.random() < 0.5 else changes


OWN_THREAD = ": its control thread has not ticked for "
"""A verdict on another thread than the one that waits."""
SELF_MADE = {"starved", "blocked", "mismatch", "straggler", "non_finite"}
"""Told of a stage whatever it is in at this moment; the first two are never roots."""


def test_no_root_waits_for_another_stage():
    waits_for_nobody([LOADS, {}], steps_in_flight=(1,), since_retired_s=5.0, core=CoreEvidence(report_age_s=0.1))
    # Seed 49,964 in short.
    meets = {"op": "collective", "op_peer": 0, "tick_age_s": 9.0, "tick_stale_for_s": 9.0}
    waits_for_nobody([{}, meets], since_retired_s=0.1)
    waits_for_nobody([OWES, LOADED, {}], steps_in_flight=(8, 9), since_retired_s=0.8)
    for seed in range(SEEDS):
        chance = Chance(seed)
        made = [any_stage(chance) for _ in range(chance.randint(1, 4))]
        finding = Finding(stage=0, cause="non_finite", summary="nan", since_s=1.0)
        waits_for_nobody(
            made, seed, steps_in_flight=tuple(chance.randint(1, 9) for _ in range(chance.randint(0, 3))),
            since_retired_s=chance.choice([6.0, chance.age(100)]),
            core=CoreEvidence(report_age_s=chance.choice([0.1, chance.age(100)])),
            stopping=chance.random() < 0.1, findings=chance.choice([(), (finding,)]),
        )  # fmt: skip


def waits_for_nobody(made, seed=None, **changes):
    facts = evidence([stage(k, **each) for k, each in enumerate(made)], **changes)
    verdicts, graph = diagnose(facts), build(facts)
    assert verdicts == diagnose(facts), f"{seed}: a pure function"
    assert not verdicts or verdicts[0].root, seed
    places = [verdict.stage for verdict in verdicts if verdict.stage is not None]
    assert len(places) == len(set(places)), f"{seed}: a stage has one verdict"
    for verdict in verdicts:
        assert len(verdict.summary) <= 100 and verdict.evidence, seed
        if verdict.cause in ("starved", "blocked"):
            assert not verdict.root, seed
        if not verdict.root or verdict.stage is None or verdict.cause in SELF_MADE or OWN_THREAD in verdict.summary:
            continue
        chain = graph.follow(main(verdict.stage))
        others = {wait.on.stage for wait in chain if wait.on.kind == "main"} - {verdict.stage}
        cycle = graph.cycle(main(verdict.stage))
        assert not others or verdict.stage in {wait.waiter.stage for wait in cycle} or verdict.cause == "link", (
            seed,
            verdict,
            chain,
        )
