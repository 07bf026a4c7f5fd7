"""Work that stands still, at the first, a middle and the last stage: every cause, and what only looks like it."""

import msgspec
import pytest
from diagnosis_world import (
    FUTEX,
    PLACES,
    POLL,
    SPINS,
    edge,
    edges_of,
    evidence,
    healthy,
    message,
    pipeline_held_at,
    stuck,
    with_stage,
)
from monitor_helpers import stage
from ppengine.diagnosis import diagnose, waits
from ppengine.diagnosis.evidence import Stack
from ppengine.protocol.stage_samples import CpuShares

CROWDED_OUT = CpuShares(user=0.2, system=0.0, main_user=0.2, main_system=0.0, main_waited=0.7)
EDGES = [(count, k) for count, k in PLACES if k < count - 1]


def only_root(verdicts):
    """Return the one root; every other stage suffers from it, and says so."""
    root, *others = verdicts
    assert root.root and not any(verdict.root for verdict in others)
    assert all(verdict.cause in ("starved", "blocked") for verdict in others)
    assert all(f"stage {root.stage}" in verdict.summary for verdict in others)
    return root


# --- self_stuck ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", ["idle", "busy"])
@pytest.mark.parametrize(("count", "k"), PLACES)
def test_a_mapping_that_never_ends_beside_steps_that_do(count, k, load):
    stages = healthy(count) if load == "idle" else with_stage(pipeline_held_at(count, k, 0.02), k, op_age_s=0.01)
    stages = with_stage(stages, k, mapping_age_s=1.6, mapping_bytes=1_000_000)
    in_flight = {} if load == "idle" else {"steps_in_flight": (8,), "since_retired_s": 0.02}
    (root,) = diagnose(evidence(stages, **in_flight))
    assert (root.stage, root.cause, root.root) == (k, "self_stuck", True)
    assert root.summary == f"stage {k} is stuck in map for 1.6s, in a thread of its own; no step waits for it"


@pytest.mark.parametrize(
    "changes",
    [
        {"mapping_age_s": 1.3},
        {"mapping_age_s": 9.0, "mapping_bytes": 40_000_000_000},
        {"mapping_age_s": 9.0, "sample_age_s": 3.0},
    ],
    ids=["it has begun", "it is much", "nobody has looked"],
)
def test_a_mapping_that_may_end(changes):
    assert [v for v in diagnose(evidence(with_stage(healthy(2), 0, **changes))) if v.cause == "self_stuck"] == []


def test_a_mapping_behind_steps_that_stand_is_no_root():
    """What holds up the device of a stage may hold up a driver that maps: the waits of the steps tell who it is."""
    stages = [msgspec.structs.replace(one, mapping_age_s=6.0) for one in pipeline_held_at(3, 0)]
    root = only_root(diagnose(stuck(stages)))
    assert root.stage == 0 and "forward m8" in root.summary


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_a_stage_that_stands_in_its_own_work(count, k):
    verdicts = diagnose(stuck(pipeline_held_at(count, k)))
    root = only_root(verdicts)
    assert (root.stage, root.cause) == (k, "self_stuck") and "forward m8" in root.summary
    assert {v.stage for v in verdicts} == set(range(count)), "all others are starved: behind it and before it"
    if k < count - 1:
        assert f"stage {k + 1} waits for it: message 7 (m8, float32[1, 64] 256 B), which is not sent" in root.evidence


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"op": "step", "op_step": 8, "last_op": "receive"}, "its own code after receive of m8"),
        ({"op": None, "op_age_s": None}, "its own code between operations"),
        ({"op": "map"}, "map m8"),
        ({"op": "sample", "process_state": "D", "main_state": "D"}, "sample m8"),
    ],
)
def test_wherever_it_stands(k, changes, words):
    stages = with_stage(pipeline_held_at(3, k, 30.0), k, **changes)
    root = only_root(diagnose(stuck(stages, 30.0)))
    assert (root.stage, root.cause) == (k, "self_stuck") and words in root.summary


@pytest.mark.parametrize(("count", "k"), [(count, k) for count, k in PLACES if k > 0])
@pytest.mark.parametrize(
    "how", [{"wchan": "hrtimer_nanosleep"}, {"cpu": SPINS, "wchan": ""}, {"cpu": CROWDED_OUT, "wchan": ""}]
)
def test_a_stage_that_is_not_in_the_wait_that_its_record_says(count, k, how):
    """The message came, the call returned, and the thread is somewhere else before it writes so."""
    stages = with_stage(pipeline_held_at(count, k), k, op="receive", op_peer=k - 1, **how)
    stages = with_stage(stages, k, edges=edges_of(count, k, 6, 6, 7, 6.0))
    root = only_root(diagnose(stuck(stages)))
    assert (root.stage, root.cause) == (k, "self_stuck") and "receive" in root.summary


@pytest.mark.parametrize(("count", "k"), [(count, k) for count, k in PLACES if k > 0])
def test_a_stage_that_has_not_posted_what_it_waits_for(count, k):
    stages = with_stage(pipeline_held_at(count, k), k, op="receive", op_peer=k - 1, wchan=POLL)
    stages = with_stage(stages, k, edges=edges_of(count, k, 6, 6, 6, 6.0))
    root = only_root(diagnose(stuck(stages)))
    assert (root.stage, root.cause) == (k, "self_stuck")


def test_a_send_thread_that_takes_nothing():
    stages = with_stage(pipeline_held_at(3, 1), 1, op="idle", finished_step=8, outbox=1, progress_age_s=0.1)
    stages = with_stage(stages, 1, unretired_age_s=None, retired_step=8)
    root = only_root(diagnose(stuck(stages)))
    assert (root.stage, root.cause) == (1, "self_stuck") and "send thread" in root.summary


def test_the_line_of_code_is_told_once_the_stack_is_there():
    stack = Stack(pid=1001, main=("nanosleep (libc.so.6)", "wait_a_while model.py:7", "run runner.py:9"))
    root = diagnose(stuck(with_stage(pipeline_held_at(2, 1), 1, stack=stack)))[0]
    assert "at wait_a_while model.py:7" in root.summary
    assert "main thread at nanosleep (libc.so.6) < wait_a_while model.py:7 < run runner.py:9" in root.evidence
    assert root.suggest == "ppconsole restart-stage 1 (or look: ppconsole stacks --stage 1)"
    unknown = diagnose(stuck(with_stage(pipeline_held_at(2, 1), 1)))[0]
    assert unknown.suggest == "ppconsole stacks --stage 1"
    other = diagnose(stuck(with_stage(pipeline_held_at(2, 1), 1, stack=msgspec.structs.replace(stack, pid=9))))[0]
    assert "model.py" not in f"{other.summary} {other.evidence}", "another process's stack"
    failed = Stack(pid=1001, error="py-spy gave no answer")
    missing = diagnose(stuck(with_stage(pipeline_held_at(2, 1), 1, stack=failed)))[0]
    assert "missing: stacks (py-spy gave no answer)" in missing.evidence


@pytest.mark.parametrize(("cpu", "word"), [(SPINS, "spins: 99 % of a core"), (None, "main thread: state S")])
def test_spinning_and_sleeping_are_told_apart(cpu, word):
    root = diagnose(stuck(with_stage(pipeline_held_at(2, 0), 0, cpu=cpu)))[0]
    assert any(word in line for line in root.evidence)


def test_a_main_loop_that_stands_while_there_is_nothing_to_do():
    stages = with_stage(healthy(2), 1, op_age_s=9.0, progress_age_s=1.7, tick_age_s=0.1, wchan="hrtimer_nanosleep")
    root = only_root(diagnose(evidence(stages)))
    assert (root.stage, root.cause) == (1, "self_stuck") and "while idle" in root.summary
    silent = with_stage(stages, 1, tick_age_s=1.0)
    assert diagnose(evidence(silent)) == [], "all of the process is late: the host is"


# --- gil_held -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "k"), PLACES)
@pytest.mark.parametrize("load", [False, True])
def test_the_gil_is_held(count, k, load):
    stages = pipeline_held_at(count, k) if load else healthy(count)
    held = {"tick_age_s": 1.7, "tick_stale_for_s": 0.4, "progress_age_s": 1.8}
    stages = with_stage(stages, k, process_state="R", cpu=SPINS, **held)
    root = only_root(diagnose(stuck(stages) if load else evidence(stages)))
    assert (root.stage, root.cause) == (k, "gil_held")
    owner = Stack(pid=1000 + k, main=("match re.py:1",), gil_owner="MainThread at match re.py:1")
    root = diagnose(evidence(with_stage(stages, k, stack=owner)))[0]
    assert "held by MainThread for" in root.summary and "GIL owner: MainThread at match re.py:1" in root.evidence


@pytest.mark.parametrize(
    "changes",
    [
        {"tick_age_s": 0.9}, {"tick_stale_for_s": 0.0}, {"tick_stale_for_s": None}, {"process_state": "T"},
        {"phase": "load"}, {"phase": "profile"}, {"process_state": "D"}, {"sample_age_s": 3.0},
        {"progress_age_s": 0.3}, {"progress_age_s": 1.1},
    ],
)  # fmt: skip
def test_a_late_tick_alone_is_not_a_held_gil(changes):
    late = {"tick_age_s": 1.7, "tick_stale_for_s": 0.4, "progress_age_s": 1.8} | changes
    late = {"process_state": "R", "phase_age_s": 5.0, "op": "receive"} | late
    assert diagnose(evidence(with_stage(healthy(2), 1, **late))) == []


@pytest.mark.parametrize(("count", "k"), PLACES)
@pytest.mark.parametrize("op", ["idle", "forward"])
def test_a_control_thread_that_is_gone_is_no_held_gil(count, k, op):
    gone = {"tick_age_s": 3.4, "tick_stale_for_s": 2.4, "progress_age_s": 0.1, "op": op, "op_age_s": 0.1}
    (root,) = diagnose(evidence(with_stage(healthy(count), k, **gone)))
    assert (root.stage, root.cause) == (k, "undetermined") and "its step loop goes on" in root.summary
    assert any("the GIL is not held" in line for line in root.evidence)
    assert diagnose(evidence(with_stage(healthy(count), k, **gone | {"tick_age_s": 2.9}))) == [], "it may be late"


def test_a_stage_that_is_stuck_without_a_control_thread_is_stuck():
    stages = with_stage(pipeline_held_at(2, 1), 1, tick_age_s=60.0, tick_stale_for_s=50.0, wchan="")
    root = only_root(diagnose(stuck(stages)))
    assert (root.stage, root.cause) == (1, "self_stuck")


# --- link ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "k"), EDGES)
@pytest.mark.parametrize("sent", [1, 2])
def test_sent_and_posted_and_not_delivered(count, k, sent):
    """`sent` 2: the bytes have left the sender's process."""
    stages = pipeline_held_at(count, k + 1)
    done = [message(n) for n in (5, 6)]
    at_receiver = (edge("receive", k, *done, message(7, 1, 6.0)), *edges_of(count, k + 1, 6, 6, 6, 6.0)[1:])
    stages = with_stage(stages, k + 1, op="receive", op_peer=k, wchan=POLL, edges=at_receiver)
    from_before = edges_of(count, k, 7, 7, 7, 6.0)[: 1 if k else 0]
    stages = with_stage(stages, k, edges=(*from_before, edge("send", k + 1, *done, message(7, sent, 6.0))))
    root = only_root(diagnose(stuck(stages)))
    assert (root.stage, root.cause) == (k, "link")
    assert f"link stage {k} -> stage {k + 1}: message 7" in root.summary


def test_a_stopped_end_is_no_broken_link():
    stages = with_stage(pipeline_held_at(2, 1), 1, op="receive", op_peer=0, wchan=POLL)
    stages = with_stage(stages, 1, edges=(edge("receive", 0, message(7, 1, 6.0)),), process_state="T")
    stages = with_stage(stages, 0, edges=(edge("send", 1, message(7, 1, 6.0)),), op="idle")
    verdicts = diagnose(stuck(with_stage(stages, 1, stopped_for_s=1.0)))
    assert (verdicts[0].stage, verdicts[0].cause) == (1, "stopped") and not any(v.cause == "link" for v in verdicts)


# --- mismatch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "k"), EDGES)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"size": 128}, "size differs"), ({"code": 7}, "element type"), ({"step": 9}, "step differs")],
)
def test_both_ends_differ_on_a_message(count, k, wrong, words):
    stages = pipeline_held_at(count, k + 1, 0.2)
    stages = with_stage(stages, k, edges=(edge("send", k + 1, message(6), message(7, **wrong)),))
    root = only_root(diagnose(evidence(stages)))
    assert (root.stage, root.cause) == (k, "mismatch") and words in root.summary and "message 7" in root.summary
    assert any("expects message 7" in line for line in root.evidence)


@pytest.mark.parametrize(
    ("sent", "posted", "tokens", "wrong"),
    [
        (1, 2, 1, 1),
        (2, 1, 1, 0),
        (2, 3, 1, 0),
        (1, 2, None, 0),
    ],
    ids=["receiver", "sender", "both, and the sender first", "tokens not known"],
)
def test_step_shows_the_end_of_an_edge_that_is_at_fault(sent, posted, tokens, wrong):
    both = message(7, size=256 * sent), message(7, 1, 0.2, size=256 * posted)
    stages = pipeline_held_at(2, 1, 0.2)
    mine = msgspec.structs.replace(edge("send", 1, both[0]), conflict=both, conflict_tokens=tokens)
    root = only_root(diagnose(evidence(with_stage(stages, 0, edges=(mine,)))))
    assert (root.stage, root.cause, root.suggest.split(";")[0]) == (
        wrong, "mismatch", f"ppconsole logs --stage {wrong}",
    )  # fmt: skip
    assert ("both recorded m8 with 1 tokens" in root.evidence[-1]) == (wrong == 1)


def test_sampled_tokens_have_no_row_for_each_token():
    """A message from the last stage to the first has a row for each request."""
    both = message(7, size=256), message(7, 1, 0.2, size=512)
    mine = msgspec.structs.replace(edge("send", 0, both[0]), conflict=both, conflict_tokens=1)
    stages = with_stage(healthy(2), 1, edges=(mine,))
    stages = with_stage(stages, 0, edges=(edge("receive", 1, both[1]),))
    assert [(v.stage, v.cause) for v in diagnose(evidence(stages)) if v.root] == [(1, "mismatch")]


@pytest.mark.parametrize(("count", "k"), EDGES)
def test_a_message_that_was_left_out(count, k):
    """Stage `k` finished the step and has not sent it; or it went on with the next number."""
    stages = pipeline_held_at(count, k + 1)
    stages = with_stage(stages, k + 1, op="receive", op_peer=k, wchan=POLL, edges=edges_of(count, k + 1, 6, 6, 7, 6.0))
    silent = with_stage(stages, k, edges=edges_of(count, k, 6, 7, 7, 6.0))
    root = only_root(diagnose(stuck(silent)))
    assert (root.stage, root.cause) == (k, "mismatch") and "finished m8 without sending it" in root.summary
    onwards = with_stage(stages, k, edges=(edge("send", k + 1, message(5), message(6), message(8)),))
    root = only_root(diagnose(stuck(onwards)))
    assert (root.stage, root.cause) == (k, "mismatch") and "message 7 was left out" in root.summary


def test_messages_of_two_generations_are_not_compared():
    stages = pipeline_held_at(2, 1, 0.2)
    stages = with_stage(stages, 0, edges=(edge("send", 1, message(7, size=9), generation=2),))
    assert diagnose(evidence(stages)) == []


def test_who_dies_of_a_mismatch_is_its_echo():
    stages = with_stage(pipeline_held_at(3, 1), 1, exit_code=-6, dead_for_s=0.3)
    stages = with_stage(stages, 0, edges=(edge("send", 1, message(6), message(7, size=512)),))
    root, *others = diagnose(stuck(stages))
    assert (root.stage, root.cause) == (0, "mismatch")
    assert (others[0].stage, others[0].cause, others[0].root) == (1, "crashed", False)
    assert "after the mismatch of stage 0" in others[0].summary


def test_an_old_mismatch_does_not_hide_what_its_stage_is_in_now():
    stages = with_stage(pipeline_held_at(2, 0), 0, stopped_for_s=1.0, process_state="T")
    both = message(3, age_s=40.0), message(3, age_s=40.0, size=1)
    stages = with_stage(stages, 0, edges=(msgspec.structs.replace(edge("send", 1), conflict=both),))
    stages = with_stage(stages, 1, edges=(edge("receive", 0, message(7, 1)),))
    assert [v.cause for v in diagnose(evidence(stages)) if v.root] == ["stopped"]
    calm = with_stage(stages, 0, stopped_for_s=None, process_state="S")
    assert [v.cause for v in diagnose(evidence(calm)) if v.root] == ["mismatch"]


# --- deadlock -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "k"), EDGES)
def test_two_stages_that_both_send(count, k):
    """Each has handed over all it may, and posts nothing before its own is taken."""
    stages = pipeline_held_at(count, k)
    for me, other in ((k, k + 1), (k + 1, k)):
        mine = edge("send", other, message(6), message(7, 1, 6.0)), edge("receive", other, message(6))
        stages = with_stage(stages, me, op="room", op_step=9, op_peer=other, edges=mine, outbox=2, wchan=FUTEX)
    root = diagnose(stuck(stages))[0]
    assert (root.cause, root.root) == ("deadlock", True) and root.stage in (k, k + 1)
    assert f"stages {k} and {k + 1} wait for each other, both in send" in root.summary
    assert any("message 7" in line and "which is not received" in line for line in root.evidence)
    assert not [v for v in diagnose(stuck(stages)) if v.root and v is not root and v.cause != "deadlock"]


def test_a_cycle_of_which_too_little_is_known_is_undetermined():
    stages = with_stage(pipeline_held_at(2, 1), 1, op="room", op_peer=0, edges=(), outbox=2, wchan=FUTEX)
    stages = with_stage(stages, 0, op="room", op_peer=1, edges=(), outbox=2, wchan=FUTEX)
    root = diagnose(stuck(stages))[0]
    assert root.cause == "undetermined" and "wait for each other" in root.summary
    assert any(line.startswith("missing:") for line in root.evidence)


# --- near misses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_just_inside_the_time(count, k):
    assert diagnose(stuck(pipeline_held_at(count, k, 1.3), 1.3)) == []


def test_a_busy_host_gives_work_more_time_and_an_empty_step_none():
    crowded = CpuShares(user=0.2, system=0.0, main_user=0.2, main_system=0.0, main_waited=0.8)
    slow = with_stage(pipeline_held_at(2, 0, 60.0), 0, cpu=crowded, expected_s=2.0)
    assert diagnose(stuck(slow, 20.0)) == [] and diagnose(stuck(slow, 50.0))[0].cause == "self_stuck"
    quick = with_stage(pipeline_held_at(2, 0, 2.0), 0, cpu=crowded, expected_s=0.01)
    assert diagnose(stuck(quick, 2.0))[0].cause == "self_stuck"


def test_without_records_of_messages_the_end_of_the_waits_is_still_named():
    stages = [msgspec.structs.replace(one, edges=()) for one in pipeline_held_at(3, 1)]
    assert only_root(diagnose(stuck(stages))).stage == 1


def test_two_stages_that_stand_in_their_own_work_are_two_roots():
    stages = with_stage(pipeline_held_at(4, 1), 3, op="forward", wchan="")
    found = diagnose(stuck(stages))
    assert [(v.stage, v.cause) for v in found if v.root] == [(1, "self_stuck"), (3, "self_stuck")]


def test_one_that_has_only_begun_is_not_a_second_root():
    stages = with_stage(pipeline_held_at(4, 1), 3, op="forward", wchan="", op_age_s=0.2)
    assert [v.stage for v in diagnose(stuck(stages)) if v.root] == [1]


def test_nothing_is_said_of_a_stage_when_the_core_is_silent():
    from ppengine.diagnosis.evidence import CoreEvidence

    found = diagnose(stuck(pipeline_held_at(2, 0), core=CoreEvidence(pid=7, process_state="S", report_age_s=4.0)))
    assert [(v.stage, v.cause) for v in found if v.root] == [(None, "core")]


def test_who_waits_for_whom_is_told_also_when_nothing_is_wrong():
    told = waits(stuck(pipeline_held_at(3, 1, 0.1), 0.1))
    assert [(one.waiter, one.on) for one in told] == [
        ("stage 0", "the engine core"), ("stage 2", "stage 1"), ("the engine core", "stage 1"),
    ]  # fmt: skip
    assert stage(0).op == "idle" and waits(evidence(healthy(3))) == []


def test_two_stages_that_wait_for_room_on_the_wire():
    """Messages too big for the kernel, from both sides: what each step loop writes is on no record yet."""
    stages = with_stage(pipeline_held_at(2, 1), 1, op="room", op_peer=0, outbox=0, wchan=POLL)
    stages = with_stage(stages, 0, op="room", op_peer=1, outbox=0, wchan=POLL)
    verdict = diagnose(stuck(stages))[0]
    assert verdict.cause == "deadlock"
    assert "both in send" in verdict.summary


def test_a_lock_in_a_send_is_no_wait_for_the_send_thread():
    stages = with_stage(pipeline_held_at(2, 0), 0, op="send", op_peer=1, outbox=0, wchan=FUTEX)
    verdict = diagnose(stuck(stages))[0]
    assert (verdict.stage, verdict.cause) == (0, "self_stuck")
    assert "send thread" not in verdict.summary


def test_a_message_that_was_left_out_closes_no_cycle():
    """Stage 0 has finished the step and waits for its tokens; stage 1 waits for the message that never came."""
    stages = with_stage(
        pipeline_held_at(2, 1), 1, op="receive", op_step=8, op_peer=0, wchan=POLL, edges=edges_of(2, 1, 6, 6, 7, 6.0)
    )
    waits_for_tokens = {"op": "token_return", "op_step": 8, "op_peer": 1, "wchan": POLL, "op_age_s": 6.0}
    known = {"finished_step": 8, "unretired_age_s": 6.0, "retired_step": 7, "edges": edges_of(2, 0, 6, 7, 7, 6.0)}
    stages = with_stage(stages, 0, **waits_for_tokens, **known)
    verdict = diagnose(stuck(stages))[0]
    assert (verdict.stage, verdict.cause) == (0, "mismatch"), verdict
    assert "stage 0 finished m8 without sending it" in verdict.summary


@pytest.mark.parametrize(("count", "k"), PLACES)
def test_a_stage_that_has_just_begun_to_move_again_is_no_root(count, k):
    """After a hang that has ended the stage is seen at work before the core tells what it has acknowledged."""
    stages = with_stage(pipeline_held_at(count, k), k, op="forward", op_step=40, op_age_s=0.05, sample_age_s=0.02)
    assert not any(verdict.root for verdict in diagnose(stuck(stages)))
    stages = with_stage(stages, k, op_age_s=0.3)
    assert only_root(diagnose(stuck(stages))).stage == k


# --- beside a death -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["idle", "forward"])
def test_what_a_death_interrupts_is_no_second_root(op):
    """Its connection closed, and a neighbour does something else for a moment; a stage that was stuck before is one."""
    stages = with_stage(pipeline_held_at(3, 1), 1, process_state=None, exit_code=-9, dead_for_s=0.7, oom_kills=0)

    def roots(op_age_s):
        found = with_stage(stages, 2, op=op, op_peer=None, op_age_s=op_age_s, progress_age_s=op_age_s, wchan="")
        return [(verdict.stage, verdict.cause) for verdict in diagnose(stuck(found)) if verdict.root]

    assert roots(0.6) == [(1, "dead")]
    assert [stage for stage, _ in roots(6.0)] == [1, 2]
