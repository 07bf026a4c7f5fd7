"""The rhythm of the gateway: judgements, and snapshots of both topics."""

from __future__ import annotations

from itertools import pairwise

from ppengine.gateway.due_times import AWAY_S, JUDGE_LEAST_S, JUDGE_S, SETTLE_S, SLACK_S, SLOW_S, Due, DueTimes

IDLE = Due(away=False, judge=False, fast=False, slow=False)


def test_a_report_is_judged_at_once_and_a_silent_agent_after_a_while() -> None:
    due = DueTimes(0.0, 0.1)
    assert due.take(0.0, news=False, fast=False).judge, "the first one"
    assert due.take(0.5 * JUDGE_LEAST_S, news=True, fast=False) == IDLE, "not twice for one burst"
    assert due.take(JUDGE_LEAST_S, news=True, fast=False).judge
    assert due.next(fast=False) == JUDGE_LEAST_S + JUDGE_S
    assert not due.take(JUDGE_S, news=False, fast=False).judge
    assert due.take(JUDGE_LEAST_S + JUDGE_S, news=False, fast=False).judge


def test_a_process_that_was_away_waits_once_for_new_reports() -> None:
    due = DueTimes(0.0, 0.1)
    due.take(0.0, news=False, fast=False)
    late = JUDGE_S + AWAY_S + 0.01
    away = due.take(late, news=True, fast=False)
    assert away.away and not away.judge
    assert not due.take(late + 0.1, news=False, fast=False).judge
    # A host that is crowded for long is judged in the end.
    later = due.take(late + SETTLE_S + 2 * AWAY_S, news=False, fast=False)
    assert later.judge and not later.away


def test_the_slow_topic_goes_with_a_judgement_and_never_much_later() -> None:
    due = DueTimes(0.0, 0.1)
    assert due.take(0.0, news=False, fast=False).slow
    assert not due.take(SLOW_S - 2 * SLACK_S, news=True, fast=False).slow
    assert due.take(SLOW_S - SLACK_S / 2, news=True, fast=False) == Due(away=False, judge=True, fast=False, slow=True)
    silent = DueTimes(0.0, 0.1)
    taken = [at / 100 for at in range(300) if silent.take(at / 100, news=False, fast=False).slow]
    assert all(before + SLOW_S - SLACK_S <= at <= before + SLOW_S + SLACK_S for before, at in pairwise(taken))


def test_the_fast_topic_has_its_period_only_for_subscribers() -> None:
    due = DueTimes(0.0, 0.1)
    assert not due.take(0.0, news=False, fast=False).fast
    taken = [at / 100 for at in range(100) if due.take(at / 100, news=False, fast=True).fast]
    assert len(taken) == 10 and taken[0] == 0.0
    assert due.next(fast=True) < due.next(fast=False)
    # Of a pause, one is made up for.
    assert [due.take(9.0 + at / 100, news=False, fast=True).fast for at in range(3)] == [True, True, False]


def test_a_gateway_that_follows_another_one_settles_first() -> None:
    due = DueTimes(5.0, 0.1, settle_s=SETTLE_S)
    assert not due.take(5.0, news=True, fast=False).judge
    assert due.take(5.0 + SETTLE_S, news=False, fast=False).judge
