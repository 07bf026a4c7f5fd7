"""A link that still moves, but slower than it did: seconds of messages at both ends, and the verdict on them."""

import msgspec
import pytest
from diagnosis_world import PLACES, edge, evidence, healthy, message, with_stage
from monitor_helpers import record
from ppengine.common.link_pace import APART_NS, LinkWatch
from ppengine.common.ring import Kind
from ppengine.diagnosis import diagnose
from ppengine.diagnosis.budgets import LINK_AFTER_S, LINK_WAITS_S, UNSEEN_AFTER_S
from ppengine.protocol.stage_samples import LinkPace, PaceSample

SECOND = 1_000_000_000


class Link:
    """One edge with messages that take as long as a test says; `waited_ns` counts up."""

    def __init__(self) -> None:
        self.watch, self.second, self.number, self.waited_ns = LinkWatch(), 0, 0, 0
        self.sent, self.posted = {}, {}
        self.watch.close(SECOND // 2)

    def run(self, ms, size=2048, messages=20, late_ms=0.0, **close):
        """Let a second pass with `messages`, each under way for `ms`; the receiver posts each `late_ms` later."""
        self.second += 1
        for index in range(messages):
            self.number += 1
            at = self.second * 1e3 + index * (1e3 / messages)
            self.sent[self.number] = record(self.number, Kind.SEND, at, at + 0.01, size=size, detail=self.number)
            self.posted[self.number] = record(
                self.number, Kind.RECEIVE, at + late_ms, at + late_ms + ms, size=size, detail=self.number
            )
        self.watch.take(1, self.sent, self.posted)
        self.watch.close(int((self.second + 0.6) * SECOND), self.waited_ns, **close)
        return self.watch.sample(int((self.second + 0.6) * SECOND))


def learned(seconds=4, ms=0.2, **more):
    link = Link()
    assert [link.run(ms, **more) for _ in range(seconds)] == [None] * seconds
    return link


def test_slow_link_has_its_rate_now_and_before():
    link = learned()
    seen = [link.run(20.0) for _ in range(4)]
    assert [each.slow_ms for each in seen] == [1000.0, 2000.0, 3000.0, 4000.0]
    assert seen[-1].rate == pytest.approx(2048 / 0.020)
    assert seen[-1].usual_rate == pytest.approx(2048 / 0.0002)
    assert seen[-1].lost == pytest.approx(20 * (20.0 - 0.2) / 1e3, abs=0.01)
    assert link.run(0.2) is None, "one second that is well ends it"


def test_late_receiver_is_no_slow_link():
    link = learned()
    assert [link.run(0.2, late_ms=30.0) for _ in range(6)] == [None] * 6


def test_wait_for_a_core_is_no_slow_link():
    link = learned()
    for _ in range(6):
        link.waited_ns += int(0.35 * SECOND)
        assert link.run(20.0) is None, "the receiver could run and had no core"


@pytest.mark.parametrize("ms", [0.5, 5.0])
def test_time_that_costs_little_is_no_slow_link(ms):
    link = learned()
    assert [link.run(ms) for _ in range(6)] == [None] * 6, "below a quarter of the second"


def test_held_ends_prove_nothing():
    link = learned()
    assert [link.run(20.0, disturbed=True) for _ in range(6)] == [None] * 6


def test_longer_prompts_are_no_slow_link():
    link = learned()
    assert [link.run(30.0, size=2048 * 300) for _ in range(5)] == [None] * 5, "as many times larger as longer"


def test_message_of_seconds_counts_in_the_second_of_its_end():
    link = learned()
    assert link.run(2500.0, messages=1).slow_ms == 2000.0
    assert link.run(2500.0, messages=1).slow_ms == 4000.0


def test_two_slow_moments_far_apart_are_not_one():
    link = learned()
    assert link.run(20.0).slow_ms == 1000.0
    assert [link.run(0.0, messages=0) for _ in range(2 * APART_NS // SECOND)][-1] is None
    assert link.run(20.0).slow_ms == 1000.0


def test_new_generation_keeps_the_usual_times():
    link = learned()
    link.sent, link.posted, link.number = {}, {}, 0
    link.watch.take(2, {}, {})
    link.watch.take, take = lambda _, *rows: take(2, *rows), link.watch.take
    assert link.run(20.0).slow_ms == 1000.0


def test_lost_record_does_not_stop_the_watch():
    link = learned()
    link.posted[link.number + 1] = record(link.number + 1, Kind.RECEIVE, 1.0, size=64, detail=link.number + 1)
    link.number += 1
    assert link.run(20.0).slow_ms == 1000.0, "a message that the ring never ended is left out"


# --- the verdict --------------------------------------------------------------------------------------------


def slow(seconds=LINK_AFTER_S, **changes):
    pace = {"rate": 1.02e5, "usual_rate": 2.1e8, "lost": 0.71, "slow_ms": seconds * 1e3} | changes
    return LinkPace(**pace)


def with_slow_link(count, k, seconds=LINK_AFTER_S):
    return with_slow_links(count, {k: slow(seconds)})


def with_slow_links(count, paces):
    """Stages whose links are slow, by their senders."""
    stages = healthy(count)
    for k, pace in paces.items():
        sent = msgspec.structs.replace(edge("send", k + 1, message(7)), pace=pace)
        stages = with_stage(stages, k, edges=(sent,))
    return stages


@pytest.mark.parametrize(("count", "k"), [place for place in PLACES if place[1] < place[0] - 1])
def test_slow_link_is_named_at_its_sender_with_both_rates(count, k):
    (verdict,) = diagnose(evidence(with_slow_link(count, k)))
    assert (verdict.stage, verdict.cause, verdict.root) == (k, "link", True)
    assert verdict.summary == f"link stage {k} -> stage {k + 1} is slow: 102 kB/s, 210 MB/s before"
    assert any("waits 71 % of the time" in line for line in verdict.evidence)
    assert verdict.suggest.startswith(f"ppconsole restart-stage {k} ")


def test_moment_of_slowness_is_no_verdict():
    assert diagnose(evidence(with_slow_link(2, 0, LINK_AFTER_S - 0.1))) == []


def test_fault_of_a_stage_explains_its_link():
    stages = with_stage(with_slow_link(2, 0), 1, process_state="T", stopped_for_s=1.0)
    assert [verdict.cause for verdict in diagnose(evidence(stages)) if verdict.root] == ["stopped"]


def test_slow_link_explains_a_slower_stage():
    late = PaceSample(step_ms=9.0, baseline_ms=5.0, slow_ms=9000.0)
    stages = with_stage(with_slow_link(2, 0), 1, pace=late)
    assert [(v.stage, v.cause) for v in diagnose(evidence(stages)) if v.root] == [(0, "link")]


@pytest.mark.parametrize(
    ("nodes", "between"), [(("a", "b"), " (a -> b)"), (("a", "a"), ""), (("", ""), ""), (("a", ""), "")]
)
def test_link_between_nodes_is_named_with_both(nodes, between):
    stages = [msgspec.structs.replace(one, node=node) for one, node in zip(with_slow_link(2, 0), nodes, strict=True)]
    (verdict,) = diagnose(evidence(stages))
    assert verdict.summary == f"link stage 0 -> stage 1{between} is slow: 102 kB/s, 210 MB/s before"


@pytest.mark.parametrize("seconds", [LINK_AFTER_S, 2 * LINK_WAITS_S])
def test_link_that_loses_little_beside_another_is_evidence_alone(seconds):
    """Answers of a receiver behind a slow link come back late, so the link to it is slower, too."""
    stages = with_slow_links(3, {0: slow(seconds, lost=0.3), 1: slow(lost=0.97)})
    (verdict,) = diagnose(evidence(stages))
    assert (verdict.stage, verdict.cause) == (1, "link")
    assert verdict.evidence[-1].startswith("also slow: link stage 0 -> stage 1: its receiver waits 30 % of the time")


def test_links_that_lose_alike_are_one_verdict_without_a_name():
    (verdict,) = diagnose(evidence(with_slow_links(3, {0: slow(lost=0.5), 1: slow(lost=0.6)})))
    assert (verdict.stage, verdict.cause, verdict.root) == (None, "link", True)
    assert verdict.summary == "2 links between stages are slow alike; none is clearly slower"
    assert [line.split(":")[0] for line in verdict.evidence[:2]] == [
        "link stage 0 -> stage 1", "link stage 1 -> stage 2",
    ]  # fmt: skip


def test_ranks_of_one_slow_link_are_named():
    stages = [
        msgspec.structs.replace(one, ranks=2, rank=rank)
        for one in with_slow_link(2, 0)
        for rank in (0, 1)
    ]  # fmt: skip
    assert [(each.stage, each.rank) for each in diagnose(evidence(stages))] == [(0, 0), (0, 1)]


@pytest.mark.parametrize("why", ["slow for less long", "sender not seen"])
def test_link_waits_for_one_that_loses_more(why):
    """A loaded host made the link before the slow one slow first, and that one was named."""

    def judged(seconds):
        worse = slow(lost=0.97, seconds=1.0 if why == "slow for less long" else LINK_AFTER_S)
        stages = with_slow_links(3, {0: slow(seconds, lost=0.3), 1: worse})
        if why == "sender not seen":
            stages = with_stage(stages, 1, sample_age_s=UNSEEN_AFTER_S + 0.1)
        return [each.stage for each in diagnose(evidence(stages)) if each.cause == "link"]

    assert judged(LINK_AFTER_S) == judged(LINK_WAITS_S - 0.1) == []
    assert judged(LINK_WAITS_S) == [0], "it does not wait for ever"
