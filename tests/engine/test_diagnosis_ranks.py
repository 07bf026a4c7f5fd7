"""Stages of several ranks: the rank at fault is named, and the ranks that wait for it only suffer."""

from __future__ import annotations

from typing import Any

import pytest
from diagnosis_world import FUTEX, POLL, SLEEPS, SPINS, edge, edges_of, evidence, message, stuck
from monitor_helpers import stage
from msgspec.structs import replace
from ppengine.diagnosis import diagnose, waits
from ppengine.diagnosis.evidence import Evidence, Key, StageEvidence, WireLoss
from ppengine.protocol.reports import Finding
from ppengine.protocol.snapshot import Verdict
from ppengine.protocol.stage_samples import PaceSample

STAGES, RANKS = 2, 2
PLACES = [(0, 0), (0, 1), (1, 0), (1, 1)]
SITE = "MLP of layer 3"
DIFFER = (
    "RanksDifferError: stage 1 rank {mine} launched all-reduce 12 ({at} of layer 3, m8, float32[4, 64] 1024 B), "
    "rank {other} launched all-reduce 12 ({there} of layer 3, m8, float32[4, 64] 1024 B): it is the first difference"
)


def place(key: Key, **changes: Any) -> StageEvidence:
    return stage(key[0], rank=key[1], ranks=RANKS, pid=1000 + 10 * key[0] + key[1], **changes)


def changed(stages: list[StageEvidence], key: Key, **changes: Any) -> list[StageEvidence]:
    return [replace(one, **changes) if one.key == key else one for one in stages]


def held_at(key: Key, seconds: float = 6.0) -> list[StageEvidence]:
    """Step 8 is at place `key`. Its peer waits in an all-reduce, the stages behind receive, those before are idle."""
    k, r = key
    stages = []
    for stage_, rank in PLACES:
        held = {"unretired_age_s": seconds, "unretired_tokens": 1, "op_age_s": seconds, "progress_age_s": seconds,
                "retired_step": 7}  # fmt: skip
        common = {"main_state": "S", "cpu": SLEEPS, "tick_age_s": 0.05, "outbox": 0}
        if stage_ < k:
            edges = edges_of(STAGES, stage_, 7, 7, 7, seconds)
            idle = {"wchan": "ep_poll", "op_age_s": seconds, "retired_step": 8, "finished_step": 8}
            stages.append(place((stage_, rank), edges=edges, **common | idle))
        elif stage_ > k:
            edges = edges_of(STAGES, stage_, 6, 6, 7, seconds)
            receives = {"op": "receive", "op_step": 8, "op_peer": stage_ - 1, "wchan": POLL}
            stages.append(place((stage_, rank), edges=edges, **common | held | receives))
        else:
            edges = edges_of(STAGES, stage_, 6, 7, 7, seconds)
            work = {"op": "forward", "op_step": 8, "wchan": FUTEX}
            joins = {"op": "all_reduce", "op_step": 8, "op_peer": r, "op_site": SITE, "wchan": POLL}
            stages.append(place((stage_, rank), edges=edges, **common | held | (work if rank == r else joins)))
    return stages


def roots(verdicts: list[Verdict]) -> list[tuple[int | None, int | None, str]]:
    return [(verdict.stage, verdict.rank, verdict.cause) for verdict in verdicts if verdict.root]


def others_suffer(verdicts: list[Verdict], key: Key) -> bool:
    """Return whether all other verdicts are consequences and name the root."""
    name = f"stage {key[0]} rank {key[1]}"
    return all(not v.root and v.cause in ("starved", "blocked") and name in v.summary for v in verdicts[1:])


# --- hangs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", PLACES)
def test_a_rank_that_hangs_is_named_and_not_the_ranks_that_wait_for_it(key: Key) -> None:
    verdicts = diagnose(stuck(held_at(key)))
    assert roots(verdicts) == [(*key, "self_stuck")]
    first = verdicts[0]
    assert first.summary.startswith(f"stage {key[0]} rank {key[1]} is stuck in forward m8")
    other = f"stage {key[0]} rank {1 - key[1]}"
    assert f"{other} waits for it: its part of all-reduce ({SITE}, m8)" in first.evidence
    assert first.suggest == f"ppconsole stacks --stage {key[0]}"
    assert others_suffer(verdicts, key) and len(verdicts) == 4


def test_a_rank_that_waits_through_another_one_is_described_to_the_end() -> None:
    waits_for_tokens = {"op": "token_return", "op_step": 10189, "op_peer": 1, "wchan": POLL, "unretired_tokens": 1}
    verdicts = diagnose(stuck(changed(held_at((1, 1)), (0, 0), **waits_for_tokens)))
    (mine,) = [verdict for verdict in verdicts if (verdict.stage, verdict.rank) == (0, 0)]
    through = "starved by stage 1 rank 1 through stage 1 rank 0"
    assert mine.summary == f"stage 0 rank 0 is {through}: token_return from 1 m10189 for 6.0s"


@pytest.mark.parametrize("key", PLACES)
@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
def test_a_rank_that_hangs_inside_a_collective_after_all_parts_were_there(key: Key, op: str) -> None:
    """Its open operation says that it waits. Its main thread spins, or sleeps elsewhere than in a poll."""
    for inside in ({"cpu": SPINS, "wchan": ""}, {"wchan": "hrtimer_nanosleep"}):
        stages = changed(held_at(key), key, op=op, op_peer=1 - key[1], op_site=SITE, **inside)
        verdicts = diagnose(stuck(stages))
        assert roots(verdicts) == [(*key, "self_stuck")]
        assert f"stuck in {op} with rank {1 - key[1]} m8" in verdicts[0].summary
        assert others_suffer(verdicts, key)


@pytest.mark.parametrize("key", PLACES)
def test_parts_that_are_not_delivered_are_the_link_of_the_ranks(key: Key) -> None:
    joins = {"op": "all_reduce", "op_peer": 1 - key[1], "op_site": SITE, "wchan": POLL}
    verdicts = diagnose(stuck(changed(held_at(key), key, **joins)))
    assert roots(verdicts) == [(key[0], None, "link")]
    text = f"stage {key[0]}: ranks 0 and 1 wait for each other in all-reduce ({SITE}, m8)"
    assert verdicts[0].summary == text
    assert verdicts[0].suggest.startswith(f"ppconsole restart-stage {key[0]}")
    assert not any(verdict.root for verdict in verdicts[1:])


@pytest.mark.parametrize("key", PLACES)
def test_a_rank_that_left_the_last_collective_of_a_step_out(key: Key) -> None:
    """No later call shows the difference: it has finished the step, and the other one waits."""
    left = {"op": "idle", "wchan": "ep_poll", "finished_step": 8, "retired_step": 8, "unretired_age_s": None,
            "progress_age_s": 0.1}  # fmt: skip
    verdicts = diagnose(stuck(changed(held_at(key), key, **left)))
    assert roots(verdicts) == [(*key, "mismatch")]
    name, other = f"stage {key[0]} rank {key[1]}", f"stage {key[0]} rank {1 - key[1]}"
    assert verdicts[0].summary.startswith(f"{name} finished m8 without launching all-reduce ({SITE}, m8); {other}")


def test_a_rank_that_never_got_its_step_is_named() -> None:
    lacks = {"op": "idle", "wchan": "ep_poll", "finished_step": 7, "retired_step": 7, "progress_age_s": 0.1}
    verdicts = diagnose(stuck(changed(held_at((1, 1)), (1, 1), **lacks)))
    assert roots(verdicts) == [(1, 1, "link")]
    assert verdicts[0].summary.startswith("stage 1 rank 1 has not got step 8")


def test_a_receive_waits_for_the_same_rank_of_the_stage_before() -> None:
    found = waits(stuck(held_at((0, 1))))
    pairs = {wait.waiter: wait.on for wait in found}
    assert pairs["stage 1 rank 0"] == "stage 0 rank 0" and pairs["stage 1 rank 1"] == "stage 0 rank 1"
    assert pairs["stage 0 rank 0"] == "stage 0 rank 1"
    assert pairs["the engine core"] in ("stage 0 rank 0", "stage 0 rank 1")


def test_a_blocked_link_is_that_of_one_rank() -> None:
    stages = held_at((1, 1))
    lost = (edge("receive", 0, message(6), message(7, 1, 6.0)),)
    receives = {"op": "receive", "op_peer": 0, "wchan": POLL, "edges": lost}
    verdicts = diagnose(stuck(changed(stages, (1, 1), **receives)))
    assert roots(verdicts) == [(0, 1, "link")]
    assert verdicts[0].summary.startswith("link stage 0 rank 1 -> stage 1 rank 1: message 7")


# --- processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", PLACES)
def test_a_stopped_or_frozen_rank(key: Key) -> None:
    for state in ({"process_state": "T"}, {"process_state": "S", "frozen": "/sys/fs/cgroup/a/cgroup.freeze"}):
        verdicts = diagnose(stuck(changed(held_at(key, 1.0), key, stopped_for_s=0.3, **state), 1.0))
        assert roots(verdicts) == [(*key, "stopped")]
        assert verdicts[0].summary.startswith(f"stage {key[0]} rank {key[1]} is stopped by")
        assert others_suffer(verdicts, key)
    assert "thaw" in verdicts[0].suggest.lower() or "echo 0 >" in verdicts[0].suggest


@pytest.mark.parametrize("key", PLACES)
def test_a_dead_rank_is_one_fault(key: Key) -> None:
    name = f"stage {key[0]} rank {key[1]}"
    peer = key[0], 1 - key[1]
    stages = changed(held_at(key, 0.5), key, process_state=None, dead_for_s=0.6, exit_code=-9)
    stages = changed(stages, peer, lost=f"lost {name}: it closed the connection", lost_for_s=0.4)
    verdicts = diagnose(stuck(stages, 0.5))
    assert roots(verdicts) == [(*key, "dead")]
    assert verdicts[0].summary == f"{name} was killed by SIGKILL"
    assert verdicts[0].suggest.startswith(f"ppconsole restart-stage {key[0]} ")
    echo = next(verdict for verdict in verdicts if (verdict.stage, verdict.rank) == peer)
    assert not echo.root and f"after {name} was gone" in echo.summary


def test_a_rank_that_blames_its_peer_waits_for_the_end_of_that_one() -> None:
    words = {"lost": "lost stage 1 rank 0: it closed the connection", "lost_for_s": 0.3}
    assert diagnose(evidence(changed(held_at((1, 0), 0.3), (1, 1), **words))) == []


@pytest.mark.parametrize("key", PLACES)
def test_a_rank_that_keeps_the_gil(key: Key) -> None:
    stages = changed(held_at(key, 2.0), key, tick_age_s=2.0, tick_stale_for_s=1.0, cpu=SPINS, process_state="R")
    verdicts = diagnose(stuck(stages, 2.0))
    assert roots(verdicts) == [(*key, "gil_held")]
    assert others_suffer(verdicts, key)


def test_two_ranks_may_be_two_faults() -> None:
    stages = changed(held_at((0, 0), 1.0), (0, 0), process_state="T", stopped_for_s=0.5)
    stages = changed(stages, (1, 1), process_state="T", stopped_for_s=0.5)
    assert sorted(roots(diagnose(stuck(stages, 1.0)))) == [(0, 0, "stopped"), (1, 1, "stopped")]


# --- ranks that launched different things ---------------------------------------------------------------------


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("launched", [True, False])
def test_ranks_that_launched_different_things_are_one_verdict_with_both_call_sites(both: bool, launched: bool) -> None:
    here = DIFFER.format(mine=0, other=1, at="attention", there="MLP") + ", found behind the launch" * launched
    there = DIFFER.format(mine=1, other=0, at="MLP", there="attention")
    stages = changed(held_at((1, 0), 0.5), (1, 0), lost=here, lost_for_s=0.2)
    peer = there if both else "lost stage 1 rank 0: it closed the connection"
    stages = changed(stages, (1, 1), lost=peer, lost_for_s=0.2, exit_code=1, dead_for_s=0.1)
    stages = changed(stages, (0, 1), lost="lost stage 1: it closed the connection", lost_for_s=0.1)
    verdicts = diagnose(stuck(stages, 0.5))
    assert roots(verdicts) == [(1, None, "mismatch")]
    first = verdicts[0]
    assert first.summary == "mismatch in stage 1 at call 12: rank 0 in attention of layer 3, rank 1 in MLP of layer 3"
    assert first.evidence[:2] == [
        "rank 0 launched all-reduce 12 (attention of layer 3, m8, float32[4, 64] 1024 B)",
        "rank 1 launched all-reduce 12 (MLP of layer 3, m8, float32[4, 64] 1024 B)",
    ]
    assert ("no sum was wrong" in first.evidence[2], "none of its tokens" in first.evidence[2]) == (
        not launched,
        launched,
    )
    assert "restart-stage 1" in first.suggest
    assert [verdict for verdict in verdicts if verdict.stage == 1] == [first], "for each of its ranks"


# --- slowness -----------------------------------------------------------------------------------------------


def paced(ratio: float, slow_ms: float) -> PaceSample:
    return PaceSample(step_ms=10.0 * ratio, baseline_ms=10.0, slow_ms=slow_ms)


@pytest.mark.parametrize("key", PLACES)
def test_a_late_rank_is_named_by_its_own_pace_with_the_waits_of_its_peers(key: Key) -> None:
    stages = [place(each, pace=paced(1.0, 0.0), rank_wait=0.6) for each in PLACES]
    stages = changed(stages, key, pace=paced(3.0, 7000.0), rank_wait=0.02)
    verdicts = diagnose(evidence(stages))
    assert roots(verdicts) == [(*key, "straggler")]
    assert verdicts[0].summary == f"stage {key[0]} rank {key[1]} is 3.0x slower than it was"
    shares = [(0, 60), (1, 60)]
    shares[key[1]] = key[1], 2
    line = ", ".join(f"rank {rank} {share} %" for rank, share in shares)
    assert f"waits for other ranks, of the last second: {line}" in verdicts[0].evidence


def test_ranks_that_are_all_slower_alike_are_no_stragglers() -> None:
    assert diagnose(evidence([place(each, pace=paced(3.0, 9000.0)) for each in PLACES])) == []


# --- wires and findings -----------------------------------------------------------------------------------------


def test_a_broken_wire_names_both_ranks() -> None:
    text = "lost stage 1 rank 0: it closed the connection"
    loss = WireLoss(stage=1, rank=1, peer=1, peer_rank=0, text=text, closed=True, since_s=0.6)
    verdicts = diagnose(evidence([place(each) for each in PLACES], losses=(loss,)))
    assert roots(verdicts) == [(1, 1, "link")]
    assert verdicts[0].summary == "stage 1 rank 1 lost its wire to stage 1 rank 0"
    gone = changed([place(each) for each in PLACES], (1, 0), dead_for_s=0.7, exit_code=-9)
    assert roots(diagnose(evidence(gone, losses=(loss,)))) == [(1, 0, "dead")]


def test_findings_of_two_ranks_are_two_verdicts_and_one_of_the_stage_is_for_both() -> None:
    def finding(rank: int | None) -> Finding:
        return Finding(stage=1, rank=rank, cause="stream_order", summary="stage 1: unordered", since_s=1.0)

    def causes(*ranks: int | None) -> list[tuple[int | None, int | None, str]]:
        found = tuple(map(finding, ranks))
        return roots(diagnose(evidence([place(each) for each in PLACES], findings=found)))

    assert causes(0, 1) == [(1, 0, "stream_order"), (1, 1, "stream_order")]
    assert causes(None) == [(1, None, "stream_order")]


# --- a silent agent -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", PLACES)
def test_without_samples_the_rank_that_is_in_no_poll_is_named(key: Key) -> None:
    stages = [replace(one, sample_age_s=5.0, glanced=True, phase=None) for one in held_at(key)]
    verdicts = diagnose(stuck(stages, agent=(77, "T")))
    assert roots(verdicts) == [(*key, "self_stuck")]
    assert verdicts[0].summary.startswith(f"stage {key[0]} rank {key[1]} is stuck in its own code with m8")


def test_one_rank_a_stage_is_named_as_ever() -> None:
    (verdict,) = diagnose(Evidence(stages=(stage(0), stage(1, process_state="T", stopped_for_s=0.3))))
    assert (verdict.stage, verdict.rank) == (1, None)
    assert verdict.summary.startswith("stage 1 is stopped by a signal (pid 1001, state T)")
