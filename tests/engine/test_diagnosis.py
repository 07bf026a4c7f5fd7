"""The verdicts: every one, at the first, middle and last stage; and every thing that is no fault."""

import msgspec
import pytest
from diagnosis_world import Chance
from monitor_helpers import stage
from ppengine.diagnosis import PHASE_BUDGET_S, diagnose, stuck_limit_s
from ppengine.diagnosis.evidence import CoreEvidence, Evidence, WireLoss
from ppengine.diagnosis.phrases import exit_words

PLACES = [(2, 0), (2, 1), (3, 1), (4, 0), (4, 1), (4, 2), (4, 3)]


def evidence(stages, **changes):
    return Evidence(stages=tuple(stages), **changes)


def healthy(count):
    return [stage(k) for k in range(count)]


def pipeline_held_at(count, k, seconds=6.0):
    """Step 8 is at stage k; the ones behind wait for it, the ones before wait to send step 9."""
    stages = []
    for index in range(count):
        held = {"unretired_age_s": seconds, "unretired_tokens": 1, "op_age_s": seconds, "progress_age_s": seconds}
        if index < k:
            stages.append(stage(index, op="room", op_step=9, op_peer=index + 1, retired_step=8, **held))
        elif index == k:
            stages.append(stage(index, op="forward", op_step=8, process_state="R", retired_step=7, **held))
        else:
            stages.append(stage(index, op="receive", op_step=8, op_peer=index - 1, retired_step=7, **held))
    return stages


def with_stage(stages, k, **changes):
    return [msgspec.structs.replace(one, **changes) if one.stage == k else one for one in stages]


def roots(verdicts):
    return [(verdict.stage, verdict.cause) for verdict in verdicts if verdict.root]


# --- verdicts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_stopped_is_named_with_who_suffers(count, k):
    stages = with_stage(pipeline_held_at(count, k, 1.0), k, process_state="T", stopped_for_s=0.3)
    verdicts = diagnose(evidence(stages, steps_in_flight=(8, 9), since_retired_s=1.0))
    assert verdicts[0].stage == k and verdicts[0].cause == "stopped"
    assert f"pid {1000 + k}" in verdicts[0].summary and f"kill -CONT {1000 + k}" in verdicts[0].suggest
    assert roots(verdicts) == [(k, "stopped")]
    others = {verdict.stage: verdict.cause for verdict in verdicts[1:]}
    assert others == {index: "blocked" if index < k else "starved" for index in range(count) if index != k}
    assert all(f"stage {k}" in verdict.summary for verdict in verdicts)


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_a_stopped_stage_is_a_fault_also_when_idle(count, k):
    stages = with_stage(healthy(count), k, process_state="T", stopped_for_s=0.2)
    assert [(v.stage, v.cause) for v in diagnose(evidence(stages))] == [(k, "stopped")]


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_a_debugger_is_named_with_its_pid_and_not_answered_with_a_signal(count, k):
    held = {"process_state": "t", "stopped_for_s": 1.1, "tracer": "gdb (pid 77)", "wchan": "ptrace_stop"}
    verdicts = diagnose(evidence(with_stage(pipeline_held_at(count, k, 1.4), k, **held), steps_in_flight=(8, 9)))
    assert roots(verdicts) == [(k, "stopped")]
    assert verdicts[0].summary.startswith(f"stage {k} is stopped by its tracer gdb (pid 77), state t")
    assert "kill" not in verdicts[0].suggest and "gdb (pid 77)" in verdicts[0].suggest


def test_a_profiler_that_looks_for_a_moment_stops_nobody():
    held = {"process_state": "t", "stopped_for_s": 0.6, "tracer": "py-spy (pid 77)"}
    assert diagnose(evidence(with_stage(healthy(2), 1, **held))) == []


def test_one_look_at_state_t_is_not_enough():
    stages = with_stage(healthy(2), 1, process_state="T", stopped_for_s=0.1)
    assert diagnose(evidence(stages)) == []


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_dead_is_named_with_the_signal(count, k):
    stages = with_stage(
        pipeline_held_at(count, k, 0.6), k, process_state=None, exit_code=-9, dead_for_s=0.2, oom_kills=0,
        exit_detail="killed by SIGKILL",
    )  # fmt: skip
    verdicts = diagnose(evidence(stages, steps_in_flight=(8, 9)))
    assert roots(verdicts) == [(k, "dead")]
    assert verdicts[0].summary == f"stage {k} was killed by SIGKILL"
    assert "no cgroup OOM" in verdicts[0].evidence
    assert len(verdicts) == count


def test_a_kill_by_the_oom_killer_is_told_apart():
    stages = with_stage(healthy(2), 1, exit_code=-9, dead_for_s=0.1, oom_kills=1)
    verdict = diagnose(evidence(stages))[0]
    assert verdict.cause == "killed_oom" and "out-of-memory killer" in verdict.summary
    assert "cgroup oom_kill +1" in verdict.evidence
    stages = with_stage(healthy(2), 1, exit_code=-9, dead_for_s=0.1, oom_kills=None)
    assert "cgroup oom_kill: not readable" in diagnose(evidence(stages))[0].evidence


def test_a_process_that_is_gone_is_dead_also_where_its_parent_does_not_say_how():
    gone = with_stage(healthy(2), 0, process_state=None, dead_for_s=0.4)
    assert diagnose(evidence(gone)) == [], "how it ended makes the cause: the parent gets half a second to say so"
    verdict = diagnose(evidence(with_stage(gone, 0, dead_for_s=0.5)))[0]
    assert (verdict.stage, verdict.cause, verdict.root) == (0, "dead", True)
    assert "not known yet" in verdict.summary


@pytest.mark.parametrize("same_look", [False, True])
def test_the_first_death_is_the_root_and_later_ones_are_echoes(same_look):
    stages = with_stage(healthy(3), 1, exit_code=-11, dead_for_s=1.0)
    for k, after in ((0, 0.2), (2, 0.9)):
        age = 1.0 if same_look else 1.0 - after
        stages = with_stage(stages, k, exit_code=1, dead_for_s=age, exit_detail="Connection closed by peer [n0]:1")
    verdicts = diagnose(evidence(stages))
    assert roots(verdicts) == [(1, "crashed")]
    assert verdicts[0].summary == "stage 1 was killed by SIGSEGV"
    assert {v.stage for v in verdicts[1:]} == {0, 2}
    assert all("after stage 1 was gone" in v.summary for v in verdicts[1:])


def test_a_late_or_different_death_is_a_root_of_its_own():
    stages = with_stage(healthy(3), 0, exit_code=-9, dead_for_s=9.0)
    stages = with_stage(stages, 1, exit_code=1, dead_for_s=8.0, exit_detail="ValueError: bad")
    stages = with_stage(stages, 2, exit_code=1, dead_for_s=1.0, exit_detail="connection closed by peer")
    assert roots(diagnose(evidence(stages))) == [(0, "dead"), (1, "crashed"), (2, "dead")]


@pytest.mark.parametrize(
    ("core", "words"),
    [
        ({"process_state": "T", "stopped_for_s": 0.4, "report_age_s": 0.5}, "stopped by a signal"),
        ({"process_state": "t", "stopped_for_s": 1.1, "tracer": "gdb (pid 7)"}, "stopped by gdb (pid 7) (state t)"),
        ({"process_state": "S", "report_age_s": 3.2}, "has not reported for 3.2s"),
        ({"process_state": None, "exit_code": -6, "dead_for_s": 0.1, "report_age_s": 0.2}, "killed by SIGABRT"),
    ],
)
def test_the_core(core, words):
    verdicts = diagnose(evidence(healthy(2), core=CoreEvidence(pid=77, **core)))
    assert [(v.stage, v.cause) for v in verdicts] == [(None, "core")]
    assert words in verdicts[0].summary and "77" in verdicts[0].summary


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_a_stage_that_stands_in_its_own_work_is_the_root_of_all_who_wait(count, k):
    verdicts = diagnose(evidence(pipeline_held_at(count, k), steps_in_flight=(8, 9), since_retired_s=6.0))
    assert verdicts[0].stage == k and verdicts[0].cause == "self_stuck"
    assert verdicts[0].summary == f"stage {k} is stuck in forward m8 for 6.0s"
    assert {v.stage: v.cause for v in verdicts[1:]} == {
        index: "blocked" if index < k else "starved" for index in range(count) if index != k
    }


def test_a_cycle_is_undetermined_and_names_both():
    stages = pipeline_held_at(2, 1)
    stages = with_stage(stages, 1, op="room", op_peer=0)
    verdict = diagnose(evidence(stages, steps_in_flight=(8,), since_retired_s=6.0))[0]
    assert verdict.cause == "undetermined" and "wait for each other" in verdict.summary


def test_a_stage_without_a_sample_is_undetermined_and_says_what_is_missing():
    stages = with_stage(pipeline_held_at(2, 1), 1, sample_age_s=None, op=None, op_step=None, process_state=None)
    verdict = diagnose(evidence(stages, steps_in_flight=(8,), since_retired_s=6.0))[0]
    assert (verdict.stage, verdict.cause) == (1, "undetermined")
    assert "the agent has never looked at stage 1" in verdict.summary and verdict.suggest.startswith("ppconsole logs")
    assert any("the agent does not run, or hangs" in line for line in verdict.evidence)


@pytest.mark.parametrize(("finished", "words"), [(7, "has not got step 8"), (8, "the core has no report of it")])
def test_a_message_between_core_and_stage_that_is_lost(finished, words):
    changes = {"unretired_age_s": 5.0, "unretired_tokens": 1, "op_age_s": 5.0, "finished_step": finished}
    stages = with_stage(healthy(2), 0, retired_step=7, **changes)
    verdict = diagnose(evidence(stages, steps_in_flight=(8,), since_retired_s=5.0))[0]
    assert (verdict.stage, verdict.cause) == (0, "link") and words in verdict.summary


@pytest.mark.parametrize("known", ["death", "wire"])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_steps_that_stages_left_with_a_lost_one_are_not_lost_messages(k, known):
    """Stage `k` is lost in step 8. Its neighbours closed their edges, theirs in turn; all idle."""
    left = {"op_age_s": 5.0, "finished_step": 7, "retired_step": 7, "unretired_age_s": 5.0}
    stages, losses = [stage(index, **left) for index in range(4)], ()
    if known == "death":
        stages = with_stage(stages, k, exit_code=-9, dead_for_s=5.0, op="forward", op_step=8)
    else:
        losses = (WireLoss(stage=k, peer=(k + 1) % 4, text="lost stage", closed=True),)
    found = diagnose(evidence(stages, steps_in_flight=(8,), since_retired_s=5.0, losses=losses))
    assert roots(found) == [(k, "dead" if known == "death" else "link")]


def test_a_phase_over_its_budget_is_told():
    stages = with_stage(healthy(2), 1, phase="profile", phase_age_s=PHASE_BUDGET_S["profile"] + 60)
    assert [(v.stage, v.cause) for v in diagnose(evidence(stages))] == [(1, "undetermined")]


# --- no fault -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4])
def test_idle_is_no_fault(count):
    stages = [stage(k, op_age_s=3600.0, progress_age_s=3600.0) for k in range(count)]
    assert diagnose(evidence(stages, since_retired_s=3600.0)) == []


def test_masks_that_do_not_come_are_a_lost_message_of_the_core():
    stages = with_stage(pipeline_held_at(2, 1, 30.0), 1, op="mask", op_age_s=30.0, wchan="do_poll")
    verdict, *others = diagnose(evidence(stages, steps_in_flight=(8,), since_retired_s=30.0))
    assert (verdict.stage, verdict.cause) == (1, "link") and "masks of m8" in verdict.summary
    assert not any(other.root for other in others)
    launched = with_stage(stages, 1, op_step=9)
    verdict, *_ = diagnose(evidence(launched, steps_in_flight=(8, 9), since_retired_s=30.0))
    assert "masks of m8" in verdict.summary, "the layers of the next step are launched before"
    late = with_stage(stages, 1, op_age_s=0.05)
    assert diagnose(evidence(late, steps_in_flight=(8,), since_retired_s=0.1)) == []


def test_who_waits_for_one_that_still_loads_is_in_no_phase_for_too_long():
    loaded = {"phase": "profile", "phase_age_s": PHASE_BUDGET_S["profile"] + 60, "op": "collective"}
    loads = {"phase": "load", "phase_age_s": PHASE_BUDGET_S["profile"] + 90, "op": "load"}
    stages = with_stage(with_stage(healthy(2), 0, **loaded), 1, **loads)
    assert diagnose(evidence(stages)) == []
    late = with_stage(stages, 1, **loads | {"phase_age_s": PHASE_BUDGET_S["load"] + 1})
    assert [verdict.stage for verdict in diagnose(evidence(late))] == [1]
    assert [verdict.stage for verdict in diagnose(evidence(with_stage(stages, 1, phase="serving")))] == [0]


def test_who_does_not_come_to_meet_its_neighbours_is_told_and_not_those_who_wait_for_it():
    waits = {"phase": "meet", "phase_age_s": PHASE_BUDGET_S["meet"] + 1}
    stages = [stage(k, op="collective", **waits) for k in range(3)]
    hangs = with_stage(stages, 1, op=None)
    assert [verdict.stage for verdict in diagnose(evidence(hangs))] == [1]
    assert [verdict.stage for verdict in diagnose(evidence(stages))] == [0, 1, 2], "nobody knows who"
    gone = with_stage(stages, 1, exit_code=-9, dead_for_s=60.0, phase="serving")
    assert [(v.stage, v.cause) for v in diagnose(evidence(gone)) if v.root] == [(1, "dead")]
    assert diagnose(evidence(with_stage(stages, 1, phase=None, phase_age_s=None, op=None))) == [], "it is being started"


@pytest.mark.parametrize("phase", sorted(PHASE_BUDGET_S))
@pytest.mark.parametrize("k", [0, 1])
def test_a_declared_phase_inside_its_budget_is_no_fault(phase, k):
    stages = with_stage(pipeline_held_at(2, k, 60.0), k, phase=phase, phase_age_s=PHASE_BUDGET_S[phase] - 1)
    assert diagnose(evidence(stages, steps_in_flight=(8,), since_retired_s=59.0)) == []


def test_progress_elsewhere_is_no_fault():
    stages = pipeline_held_at(3, 1, 30.0)
    assert diagnose(evidence(stages, steps_in_flight=(8, 9), since_retired_s=0.4)) == []


@pytest.mark.parametrize(
    ("tokens", "expected", "since", "fault"),
    [
        (1, 0.02, 1.3, False), (1, 0.02, 1.6, True), (2048, 4.0, 19.0, False), (2048, 4.0, 20.0, True),
        (2048, None, 60.0, False), (2048, None, 110.0, True),
    ],
)  # fmt: skip
def test_the_limit_scales_with_the_work(tokens, expected, since, fault):
    stages = with_stage(pipeline_held_at(2, 0, since), 0, unretired_tokens=tokens, expected_s=expected)
    assert bool(diagnose(evidence(stages, steps_in_flight=(8,), since_retired_s=since))) is fault


@pytest.mark.parametrize("op", ["swap_out", "map", "forward"])
def test_copies_and_mapping_of_a_step_get_their_time_whatever_it_is_at(op):
    copies = with_stage(pipeline_held_at(2, 0), 0, op=op, unretired_tokens=0, unretired_moved=1_000_000_000)
    assert stuck_limit_s(tuple(copies)) == 9.35
    assert diagnose(evidence(copies, steps_in_flight=(8,), since_retired_s=6.0)) == []
    maps = with_stage(pipeline_held_at(2, 0), 0, op=op, unretired_tokens=0, mapping_bytes=40_000_000_000)
    assert stuck_limit_s(tuple(maps)) == 19.35
    small = {"unretired_moved": 100_000, "mapping_bytes": 1_000_000}
    assert stuck_limit_s(tuple(with_stage(pipeline_held_at(2, 0), 0, op=op, unretired_tokens=0, **small))) == 1.35


def test_processes_that_end_with_the_engine_are_no_fault():
    stages = [stage(k, exit_code=0 if k else -15, dead_for_s=0.3) for k in range(2)]
    core = CoreEvidence(pid=7, exit_code=0, dead_for_s=0.5, report_age_s=9.0)
    assert diagnose(evidence(stages, core=core, stopping=True)) == []


def test_a_core_that_has_not_begun_to_report_is_no_fault():
    stages = [stage(k, phase="load", phase_age_s=30.0, op=None) for k in range(2)]
    assert diagnose(evidence(stages, core=CoreEvidence(pid=7, process_state="R"))) == []


def test_nothing_known_is_no_fault():
    assert diagnose(evidence([msgspec.structs.replace(stage(0), **dict.fromkeys(BARE))])) == []


BARE = ("pid", "process_state", "phase", "phase_age_s", "sample_age_s", "op", "op_age_s", "progress_age_s")

# --- whatever comes -----------------------------------------------------------------------------------------


def any_stage(chance):
    """Return changes of a stage. Each may be left out, so that the others meet a stage that is well."""
    letters = [*"a \n\r\x1b\u202e", chr(chance.randrange(0xD800))]
    long = "".join(chance.choices(letters, k=chance.randint(0, 300)))
    changes = {
        "pid": chance.maybe(chance.randint(1, 9999)),
        "exit_code": chance.choice([None, None, -9, 0, chance.randint(-70, 255)]),
        "exit_detail": chance.choice(["", "Connection closed by peer", long]),
        "dead_for_s": chance.age(1000),
        "process_state": chance.choice([None, "R", "S", "D", "T", "t", "Z"]),
        "stopped_for_s": chance.age(1000),
        "phase": chance.choice([None, "serving", "load", "closing", "phase9"]),
        "phase_age_s": chance.age(1000),
        "sample_age_s": chance.age(1000),
        "op": chance.choice(
            [None, "idle", "receive", "send", "room", "forward", "token_return", "mask", "map", "kind99"]
        ),
        "op_age_s": chance.age(1000),
        "op_step": chance.maybe(chance.randint(0, 99)),
        "op_peer": chance.maybe(chance.randint(-1, 6)),
        "unretired_moved": chance.randint(0, 2 ** chance.randint(0, 40)),
        "mapping_bytes": chance.randint(0, 2 ** chance.randint(0, 40)),
        "mapping_age_s": chance.age(1000),
        "retired_step": chance.maybe(chance.randint(0, 99)),
        "unretired_age_s": chance.age(1000),
        "unretired_tokens": chance.randint(0, 4096),
        "expected_s": chance.age(1000),
    }
    share = chance.choice((0.2, 0.5, 1.0))
    return {name: value for name, value in changes.items() if chance.random() < share}


def test_any_evidence_gives_a_sane_list():
    for seed in range(1500):
        chance = Chance(seed)
        given = Evidence(
            stages=tuple(stage(k, **any_stage(chance)) for k in range(chance.randint(1, 5))),
            steps_in_flight=tuple(chance.randint(1, 99) for _ in range(chance.randint(0, 4))),
            since_retired_s=chance.age(1000), stopping=chance.random() < 0.25,
            core=CoreEvidence(report_age_s=chance.age(1000)),
        )  # fmt: skip
        verdicts = diagnose(given)
        assert verdicts == diagnose(given), f"{seed}: a pure function"
        places = [verdict.stage for verdict in verdicts]
        assert len(places) == len(set(places)), f"{seed}: a stage has one verdict"
        order = [verdict.root for verdict in verdicts]
        assert order == sorted(order, reverse=True), f"{seed}: roots come first"
        assert not verdicts or verdicts[0].root, seed
        for verdict in verdicts:
            assert len(verdict.summary) <= 200 and "\n" not in verdict.summary and verdict.evidence, seed
            # A stage that dies of another's death may do so by an abort.
            assert verdict.root or verdict.cause in ("starved", "blocked", "dead", "crashed"), seed


def test_exit_statuses_in_words():
    assert exit_words(-9) == "was killed by SIGKILL"
    assert exit_words(3) == "exited with code 3"
    assert exit_words(-99) == "was killed by signal 99"
    assert "not known" in exit_words(None)
