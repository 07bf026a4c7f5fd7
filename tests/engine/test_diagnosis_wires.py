"""Wires that break between live stages: told until healed and a little longer, never in place of a death."""

import pytest
from diagnosis_world import PLACES, evidence, healthy, pipeline_held_at, stuck, with_stage
from ppengine.diagnosis import diagnose
from ppengine.diagnosis.budgets import HEALED_TOLD_S
from ppengine.diagnosis.evidence import WireLoss

CLOSED = "lost stage 0: it closed the connection"


def loss(stage=1, peer=0, **changes):
    return WireLoss(**{"stage": stage, "peer": peer, "text": CLOSED, "closed": True, "since_s": 0.8, **changes})


def roots(found):
    return [(verdict.stage, verdict.cause) for verdict in found if verdict.root]


@pytest.mark.parametrize(("count", "k"), [place for place in PLACES if place[1]])
def test_a_wire_that_broke_is_told_at_who_lost_it(count, k):
    (verdict,) = diagnose(evidence(healthy(count), losses=(loss(k, k - 1),)))
    assert (verdict.stage, verdict.cause, verdict.root) == (k, "link", True)
    assert verdict.summary == f"stage {k} lost its wire to stage {k - 1}"
    assert any(CLOSED in line for line in verdict.evidence)


def test_one_that_is_healed_is_told_for_a_while_with_what_it_cost():
    told = loss(since_s=3.3, healed_s=3.0, recomputed=12)
    (verdict,) = diagnose(evidence(healthy(2), losses=(told,)))
    assert (
        verdict.summary == "stage 1 lost its wire to stage 0; all stages met again after 0.3s, 12 requests recomputed"
    )
    assert roots(diagnose(evidence(healthy(2), losses=(loss(healed_s=HEALED_TOLD_S),)))) == [(1, "link")]
    assert diagnose(evidence(healthy(2), losses=(loss(healed_s=HEALED_TOLD_S + 0.1),))) == []


def test_what_was_not_due_is_a_mismatch_of_its_sender():
    told = loss(closed=False, text="stage 0 sent message 0 (m0, 0 B), due was message 7 (m8, float64[1, 64] 512 B)")
    (verdict,) = diagnose(evidence(healthy(2), losses=(told,)))
    assert (verdict.stage, verdict.cause) == (0, "mismatch")
    assert "due was message 7" in verdict.evidence[0]


def test_who_expected_a_wrong_message_is_the_mismatch():
    text = "stage 0 sent message 7 (m8, float64[1, 64] 512 B), due was message 7 (m8, float64[2, 64] 1024 B); m8 has 1"
    (verdict,) = diagnose(evidence(healthy(2), losses=(loss(1, 1, closed=False, text=text),)))
    assert (verdict.stage, verdict.cause) == (1, "mismatch")
    assert verdict.summary == "stage 1 expected a message that its step does not have"
    assert "due was message 7" in verdict.evidence[0]


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("healed_s", [None, 0.5])
def test_the_end_of_a_process_explains_a_wire(gone, healed_s):
    stages = with_stage(healthy(2), gone, exit_code=-9, dead_for_s=0.3, oom_kills=0)
    assert roots(diagnose(evidence(stages, losses=(loss(healed_s=healed_s),)))) == [(gone, "dead")]
    unsaid = with_stage(healthy(2), gone, process_state=None, dead_for_s=0.3)
    assert diagnose(evidence(unsaid, losses=(loss(healed_s=healed_s),))) == [], "its parent will say how"


def test_an_engine_that_stops_has_lost_nothing():
    assert diagnose(evidence(healthy(2), losses=(loss(),), stopping=True)) == []


def test_what_stands_now_comes_before_what_is_healed():
    found = diagnose(stuck(pipeline_held_at(2, 1), losses=(loss(healed_s=2.0),)))
    assert roots(found) == [(1, "self_stuck")]
