"""Facts of core and supervisor in any order that their sockets allow: the same evidence and the same verdicts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monitor_helpers import processes, sample, stage_process
from ppengine.diagnosis import diagnose
from ppengine.diagnosis.evidence import Evidence
from ppengine.diagnosis.fault_log import SHOWN_NS, FaultLog
from ppengine.diagnosis.process_history import Sighting
from ppengine.diagnosis.tracker import EvidenceTracker
from ppengine.protocol.facts import Exited, Fact, GenerationBegan, LinkBroke, Lost, Serving
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ToCollector

S = 1_000_000_000
CLOSED = "lost stage 0: it closed the connection"


def exited(at_s: float, stage: int, generation: int = 1, exit_code: int = -9) -> Exited:
    return Exited(
        mono_ns=int(at_s * S), role="stage", place=Place(stage, 0), generation=generation,
        pid=100 * generation + stage, exit_code=exit_code,
    )  # fmt: skip


def lost(at_s: float, stage: int, generation: int = 1, words: str = "ValueError: x") -> Lost:
    pid = 100 * generation + stage
    return Lost(mono_ns=int(at_s * S), place=Place(stage, 0), generation=generation, words=words, pid=pid)


def broke(at_s: float, stage: int = 1, peer: int = 0) -> LinkBroke:
    return LinkBroke(mono_ns=int(at_s * S), stage=stage, peer=peer, text=CLOSED, closed=True)


def began(at_s: float, generation: int, *restarted: int) -> GenerationBegan:
    places = tuple(Place(stage, 0) for stage in restarted)
    return GenerationBegan(mono_ns=int(at_s * S), generation=generation, restarted=places, why="a fault")


def serving(at_s: float, *generations: int, recomputed: int = 0) -> Serving:
    places = tuple((Place(stage, 0), generation) for stage, generation in enumerate(generations))
    return Serving(
        mono_ns=int(at_s * S), generation=max(generations), processes=places, took_s=0.4, recomputed=recomputed
    )  # fmt: skip


def log_of(*facts: Fact) -> FaultLog:
    log = FaultLog()
    for fact in facts:
        log.take(fact)
    return log


# --- one by one ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fact", [exited(1, 1), lost(1, 1), broke(1), began(1, 2, 1), serving(1, 1, 2)], ids=lambda fact: type(fact).__name__
)
def test_a_fact_survives_the_wire(fact: Fact) -> None:
    assert Codec(ToCollector).decode(encode(fact)) == fact


def test_an_end_is_news_until_a_later_process_of_its_place_serves_and_for_a_while() -> None:
    log = log_of(exited(1, 1), serving(1.1, 1, 1), began(1.2, 2, 1))
    assert log.end((1, 0), 2 * S).generation == 1, "that process has not served since: its own generation has"
    assert log.end((1, 0), 900 * S).generation == 1, "the successor loads"
    assert log.end((0, 0), 2 * S) is None
    log.take(serving(901, 1, 2))
    assert log.end((1, 0), 902 * S) is None


@pytest.mark.parametrize(("gateway_s", "news"), [(None, False), (1.1, True), (1.6, False)])
def test_an_end_that_no_gateway_has_shown_is_news(gateway_s: float | None, news: bool) -> None:
    """The gateway before was killed with the stage, and all serve again before this one begins."""
    log = FaultLog(since_ns=2 * S)
    facts: list[Fact] = [exited(1, 1), serving(1.2, 1, 2)]
    if gateway_s is not None:
        ended = Exited(mono_ns=int(gateway_s * S), role="gateway", place=None, generation=1, pid=7, exit_code=-9)
        facts.append(ended)
    for fact in facts:
        log.take(fact)
    assert (log.end((1, 0), 3 * S) is not None) == news


def test_an_end_that_is_over_before_it_was_judged_is_shown_from_the_first_judgement() -> None:
    log = log_of(exited(1, 1), serving(1.3, 1, 2))
    assert log.end((1, 0), 60 * S) is not None
    assert log.end((1, 0), 60 * S + SHOWN_NS - 1) is not None
    assert log.end((1, 0), 60 * S + SHOWN_NS) is None


def test_a_broken_wire_has_the_ages_of_its_facts() -> None:
    log = log_of(broke(10))
    (loss,) = log.losses(11 * S)
    assert (loss.since_s, loss.healed_s, loss.generation) == (1.0, None, None)
    log.take(began(10.5, 2))
    (loss,) = log.losses(12 * S)
    assert (loss.since_s, loss.healed_s, loss.generation) == (2.0, None, 2)
    log.take(serving(10.9, 1, 1, recomputed=7))
    log.take(serving(14, 1, 3, recomputed=9))
    (loss,) = log.losses(13_900_000_000)
    assert (loss.since_s, loss.healed_s, loss.recomputed) == (3.9, 3.0, 7), "the first generation healed it"
    log.take(broke(20))
    (loss,) = log.losses(21 * S)
    assert (loss.since_s, loss.healed_s, loss.generation) == (1.0, None, None), "another failure"


@pytest.mark.parametrize(
    ("end", "explains"),
    [(exited(10.3, 0), True), (exited(9.6, 1), True), (lost(10.1, 1), True), (exited(30, 1), True),
     (exited(9.4, 1), False), (exited(10.3, 2), False)],
)  # fmt: skip
def test_the_end_of_a_process_explains_a_wire_at_its_ends(end: Fact, explains: bool) -> None:
    for facts in ((broke(10), end), (end, broke(10))):
        assert (log_of(*facts).losses(31 * S) == ()) == explains


def test_a_broken_wire_is_said_to_wait_for_a_generation_only_if_one_began() -> None:
    """An engine that stays down begins none."""
    log = log_of(broke(10))
    for words in ("no new generation has begun", "generation 2 has begun"):
        evidence = EvidenceTracker(2, 10.0).build(11 * S, None, {}, None, None, faults=log)
        (verdict,) = [one for one in diagnose(evidence) if one.cause == "link"]
        assert any(words in line for line in verdict.evidence)
        log.take(began(10.5, 2))


def test_ends_of_many_generations_do_not_add_up() -> None:
    log = log_of(*(exited(number, 1, number) for number in range(1, 99)))
    assert len(log._ends[1, 0]) == 2 and log.end((1, 0), 99 * S).generation == 98


# --- any interleaving -----------------------------------------------------------------------------------------

STAGES = 3


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Fact], list[Fact], list[int]]:
    """Return facts of the core, facts of the supervisor, and the generations of the processes at the end."""
    core, supervisor, started, at = [], [], [1] * STAGES, 10.0
    for generation in range(2, 2 + draw(st.integers(1, 4))):
        gone = draw(st.lists(st.sampled_from(["exits", "says", "both", ""]), min_size=STAGES, max_size=STAGES))
        at += draw(st.sampled_from([0.7, 1.0, 3.0]))  # Facts of one sender are in the order of their times.
        for stage, how in enumerate(gone):
            if how in ("exits", "both"):
                supervisor.append(exited(at, stage, started[stage]))
            if how in ("says", "both"):
                core.append(lost(at + draw(st.sampled_from([-0.1, 0.1])), stage, started[stage]))
        if draw(st.booleans()):
            core.append(broke(at + 0.2, *draw(st.sampled_from([(0, 1), (1, 0), (2, 1)]))))
        if draw(st.booleans()):
            restarted = [stage for stage, how in enumerate(gone) if how]
            for stage in restarted:
                started[stage] = generation
            core.append(began(at + 0.3, generation, *restarted))
            if draw(st.booleans()):
                core.append(serving(at + 0.5, *started, recomputed=generation))
    return core, supervisor, started


def seen_by(facts: list[Fact], started: list[int], moments: list[int]) -> list[Evidence]:
    """Return the evidence at each moment once all facts have come."""
    tracker, log = EvidenceTracker(STAGES, 10.0), log_of(*facts)
    pids = [100 * generation + stage for stage, generation in enumerate(started)]
    listed = processes(*(stage_process(k, pid=pid, generation=started[k]) for k, pid in enumerate(pids)))
    found = []
    for now_ns in moments:
        sightings = {(k, 0): Sighting(sample(k, pid=pid), now_ns) for k, pid in enumerate(pids)}
        found.append(tracker.build(now_ns, None, sightings, listed, None, faults=log))
    return found


@settings(max_examples=300, deadline=None)
@given(history=histories(), turns=st.lists(st.booleans(), max_size=40), later_s=st.lists(st.floats(0, 20), max_size=4))
def test_any_interleaving_gives_the_same_evidence_and_verdicts(history, turns, later_s) -> None:
    core, supervisor, started = history
    mixed, queues = [], ([*core], [*supervisor])
    for turn in turns:
        if queues[turn]:
            mixed.append(queues[turn].pop(0))
    mixed += queues[0] + queues[1]
    moments = sorted(int((20 + second) * S) for second in [0.0, *later_s])
    by_time = sorted([*core, *supervisor], key=lambda fact: fact.mono_ns)
    orders = ([*core, *supervisor], [*supervisor, *core], by_time, mixed)
    # A new gateway gets the facts again, behind some that have waited for it.
    orders += ([*mixed, *core, *supervisor], [*mixed[len(mixed) // 2 :], *supervisor, *core])
    first, *others = [seen_by(order, started, moments) for order in orders]
    assert all(other == first for other in others)
    assert [diagnose(one) for one in first] == [diagnose(one) for one in others[0]]
    for stage in first[0].stages:
        gone = [
            fact for fact in (*core, *supervisor) if isinstance(fact, Exited | Lost) and fact.place[0] == stage.stage
        ]
        served = [fact for fact in core if isinstance(fact, Serving)]
        newest = max((fact.generation for fact in gone), default=0)
        assert (stage.dead_for_s is not None or bool(stage.lost)) == bool(gone), "each end is shown once at least"
        late = seen_by(by_time, started, [moments[0], moments[0] + 30 * S])[1].stages[stage.stage]
        over = bool(served) and dict(served[-1].processes)[Place(stage.stage, 0)] > newest
        assert (late.dead_for_s is not None or bool(late.lost)) == (bool(gone) and not over)
