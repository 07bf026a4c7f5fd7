"""The times at which the gateway judges and publishes; all are of the monotonic clock, in seconds."""

from __future__ import annotations

from typing import NamedTuple

JUDGE_S = 0.4
"""Seconds after which the diagnosis runs without a report of an agent; with each report it runs at once."""
JUDGE_LEAST_S = 0.05
AWAY_S, SETTLE_S = 1.0, 1.0
"""A judgement that is later than the first, in seconds, waits once for the second."""
SLOW_S, SLACK_S = 1.0, 0.1
"""The slow topic's period and slack in seconds: it goes with a judgement, in one turn of the loop."""


class Due(NamedTuple):
    """The work of one turn."""

    away: bool
    """This process was not scheduled, and perhaps none was: all reports look old, and new ones come."""
    judge: bool
    fast: bool
    slow: bool


class DueTimes:
    """Asked once a turn; the next times follow from the answer."""

    def __init__(self, now: float, period_s: float, settle_s: float = 0.0) -> None:
        """`period_s`: of the fast topic. `settle_s`: until the first judgement."""
        self._period_s = period_s
        self._judge, self._fast, self._slow = now + settle_s, now, now
        self._settling = False

    def next(self, *, fast: bool) -> float:
        """Return the time of the next turn without a message. `fast`: the fast topic has a subscriber."""
        due = min(self._judge, self._slow + SLACK_S)
        return min(due, self._fast) if fast else due

    def take(self, now: float, *, news: bool, fast: bool) -> Due:
        """Return the work that is due at `now`. `news`: an agent has reported since the last judgement."""
        judge = now >= self._judge or (news and now >= self._judge - JUDGE_S + JUDGE_LEAST_S)
        away = judge and now - self._judge > AWAY_S and not self._settling
        if away:
            judge, self._judge, self._settling = False, now + SETTLE_S, True
        if judge:
            self._judge, self._settling = now + JUDGE_S, False
        fast = fast and now >= self._fast
        if fast:
            self._fast = max(self._fast + self._period_s, now)
        slow = now >= self._slow + SLACK_S or (judge and now >= self._slow - SLACK_S)
        if slow:
            self._slow = now + SLOW_S
        return Due(away, judge, fast, slow)
