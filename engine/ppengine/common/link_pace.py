"""Is a link slower than it was? Compares the time that a receiver waits for messages under way with earlier seconds.

A message is under way from its sending, or from the moment at which its receiver has posted it, until it is there. So
this time is lost to the link alone. It is compared by classes of size, as `agent/pace.py` compares steps by their work.
Times between two nodes have the error of their clocks. Such a link is slow only if it is so within all errors.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ppengine.common.ring import BEGUN_NS, DONE_NS, SIZE, Row
from ppengine.protocol.stage_samples import LinkPace

WINDOW_NS = 1_000_000_000
SLOW_RATIO, SLOW_SHARE = 3.0, 0.25
"""A second is slow if messages take this many times as long as usual, and longer by this share of the second."""
LEAST_SECONDS = 2
"""Least number of seconds from which the usual times are known."""
MOST = 15
"""Number of newest seconds whose means of a class are kept."""
APART_NS = 3_000_000_000
"""Nanoseconds without a message after which two slow seconds are no longer one slowness, and a second ends anyhow."""


class _Sum(NamedTuple):
    """Messages of one class in one second."""

    messages: int = 0
    size: int = 0
    ms: float = 0.0
    error_ms: float = 0.0
    """Largest error of the sum of milliseconds."""


class _Usual(NamedTuple):
    """Usual milliseconds of a message: as measured, and as they may be at most."""

    ms: float
    most_ms: float

    def times(self, factor: float) -> _Usual:
        """Return the time of that many messages."""
        return _Usual(self.ms * factor, self.most_ms * factor)


class LinkWatch:
    """Watches one edge. `take` new messages, `close` as soon as a second is over."""

    def __init__(self) -> None:
        self._generation, self._number = -1, 0
        """Newest message that was taken."""
        self._second: dict[int, _Sum] = {}
        self._known: dict[int, deque[_Usual]] = {}
        """Mean milliseconds of a message by class, a pair a second."""
        self._learned = 0
        self._since_ns = 0
        self._waited_ns = 0
        self._slow_ns = 0
        self._slow_until_ns = 0
        self._newest: LinkPace | None = None

    def take(self, generation: int, sent: dict[int, Row], posted: dict[int, Row], error_ns: int = 0) -> None:
        """Take the messages that have arrived since the last call, by number, from the records of both ends.

        Messages behind the newest of the other end are left for a later call. `error_ns`: that of their clocks.
        """
        if generation != self._generation:
            self._generation, self._number = generation, 0
        newest = next(reversed(posted), 0)
        both = min(newest, next(reversed(sent), 0))
        for number in range(max(self._number, next(iter(posted), 1) - 1) + 1, both + 1):
            into, out = posted.get(number), sent.get(number)
            if number == newest and into is not None and not into[DONE_NS]:
                return
            self._number = number
            if into is not None and into[DONE_NS] and out is not None:
                ms = max(0, into[DONE_NS] - max(out[BEGUN_NS], into[BEGUN_NS])) / 1e6
                kind = into[SIZE].bit_length()
                known = self._second.get(kind, _Sum())
                error_ms = known.error_ms + error_ns / 1e6
                self._second[kind] = _Sum(known.messages + 1, known.size + into[SIZE], known.ms + ms, error_ms)

    def due(self, now_ns: int) -> bool:
        """Whether the second is over.

        Messages are taken once both ends have reported them. Until then the excuses of their time are kept for them.
        """
        length_ns = now_ns - self._since_ns
        return length_ns >= APART_NS or (length_ns >= WINDOW_NS and bool(self._second))

    def close(self, now_ns: int, waited_ns: int = 0, *, disturbed: bool = False) -> None:
        """End the second, once it is over.

        `waited_ns`: time without a core of the receiver's thread so far. `disturbed`: one end was held in this second
        by a debugger or a quota, so that it proves nothing.
        """
        length_ns = now_ns - self._since_ns
        second, self._second = self._second, {}
        waited_ms = max(0, waited_ns - self._waited_ns) / 1e6
        first, self._since_ns, self._waited_ns = not self._since_ns, now_ns, waited_ns
        if second and not first and not disturbed:
            self._judge(second, waited_ms, length_ns, now_ns)

    def sample(self, now_ns: int) -> LinkPace | None:
        """Return the newest slow second; None if the link is as it was."""
        return self._newest if self._slow_ns and now_ns - self._slow_until_ns < APART_NS else None

    def _judge(self, second: Mapping[int, _Sum], waited_ms: float, length_ns: int, now_ns: int) -> None:
        took_ms = sum(each.ms for each in second.values())
        usual = [(self._usual(kind) or _Usual(0.0, 0.0)).times(each.messages) for kind, each in second.items()]
        most_ms = sum(each.most_ms for each in usual)
        known = self._learned >= LEAST_SECONDS and most_ms > 0
        slow = known and took_ms >= SLOW_RATIO * sum(each.ms for each in usual)
        least_ms = took_ms - sum(each.error_ms for each in second.values())
        lost_ms = least_ms - most_ms - waited_ms
        if slow and (least_ms < SLOW_RATIO * most_ms or lost_ms < SLOW_SHARE * length_ns / 1e6):
            return  # The clocks or the host may explain it, or it costs nothing.
        if not slow:
            self._slow_ns = 0
            self._learn(second)
            return
        if now_ns - self._slow_until_ns > APART_NS:
            self._slow_ns = 0
        # A message that takes seconds is one that ends in a single second.
        self._slow_ns += min(max(length_ns, int(took_ms * 1e6)), 2 * WINDOW_NS)
        self._slow_until_ns = now_ns
        size = sum(each.size for each in second.values())
        self._newest = LinkPace(
            rate=size / least_ms * 1e3,
            usual_rate=size / most_ms * 1e3,
            lost=round(min(1.0, lost_ms * 1e6 / length_ns), 3),
            slow_ms=round(self._slow_ns / 1e6, 1),
        )

    def _usual(self, kind: int) -> _Usual | None:
        """Return the usual time of a message of a class; None without any message like it or smaller."""
        if kind in self._known:
            return _median(self._known[kind])
        smaller = [other for other in self._known if other < kind]
        if smaller:
            # Bytes at most in proportion: nothing about a larger message costs more.
            return _median(self._known[max(smaller)]).times(2.0 ** (kind - max(smaller) + 1))
        larger = min(self._known, default=None)
        return None if larger is None else _median(self._known[larger])

    def _learn(self, second: Mapping[int, _Sum]) -> None:
        for kind, each in second.items():
            mean = _Usual(each.ms, each.ms + each.error_ms).times(1 / each.messages)
            self._known.setdefault(kind, deque(maxlen=MOST)).append(mean)
        self._learned += 1


def _median(known: Iterable[_Usual]) -> _Usual:
    return _Usual(*map(statistics.median, zip(*known, strict=True)))
