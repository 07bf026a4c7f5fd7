"""For how much of the time the GIL of a stage is held by a thread that does not let go, from its probe's counts."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ppengine.protocol.stage_samples import GilSample

WINDOW_NS = 3_000_000_000
LEAST_PROBES = 15
"""Least number of probes in a window: at least ten a second are made."""
LEAST_HOLDS = 3
"""Least number of holds in a window: one or two may be of a thread that lost its core with the GIL."""
LONG_MS = 8.0
"""Least wait that counts as a hold; see `stage/gil_probe.py`."""
TURNS, TURN_MS = 0.7, 1.5
"""Share of the probes that find the GIL held, and mean wait of a probe, from which a thread takes each turn it gets.

A probe waits for less than its turn of 5 ms: a main thread that asked before it gets the GIL first, and soon lets go.
"""


class Counts(NamedTuple):
    """The counts of the probe so far."""

    probes: int
    waits: int
    wait_ns: int
    holds: int
    hold_ns: int
    sleep_ns: int


class GilWatch:
    """Watches one process. Call `look` about once a second."""

    def __init__(self) -> None:
        self._looks: deque[tuple[int, Counts]] = deque()
        self._paused_ns = 0

    def look(self, now_ns: int, counts: Counts, paused_ns: int = 0) -> GilSample | None:
        """Enter the counts of this moment; return what the window shows, None without enough probes.

        `paused_ns`: time so far in which a stage was paused for its stacks; such a time proves nothing.
        """
        if paused_ns != self._paused_ns or (self._looks and counts.probes < self._looks[-1][1].probes):
            self._paused_ns = paused_ns
            self._looks.clear()
        self._looks.append((now_ns, counts))
        while len(self._looks) > 2 and now_ns - self._looks[1][0] >= WINDOW_NS:
            self._looks.popleft()
        since_ns, first = self._looks[0]
        grown = Counts._make(last - before for last, before in zip(counts, first, strict=True))
        probes, waits = grown.probes, grown.waits
        if probes < LEAST_PROBES or now_ns - since_ns < WINDOW_NS:
            return None
        share, hold_ms = _share(probes, grown.holds, grown.hold_ns / 1e6, grown.sleep_ns / 1e6)
        if waits >= TURNS * probes and grown.wait_ns / 1e6 >= TURN_MS * probes and share < waits / probes:
            share, hold_ms = waits / probes, None
        return GilSample(share=round(share, 3), hold_ms=hold_ms, over_s=(now_ns - since_ns) / 1e9)


def _share(probes: int, holds: int, waited_ms: float, slept_ms: float) -> tuple[float, float | None]:
    """Return the share of the time in which the GIL is held, and the milliseconds of a hold.

    A wait that begins at any moment of a hold lasts for the rest of it, half of it on average; short rests are not
    counted, so they are added. Long sleeps end at any moment, and the share of those that end in a hold is that of the
    time. Short ones follow one another from the end of a hold to within the next one, so that all time is seen; half of
    a sleep of each hold is over before. Each underestimates with the sleeps of the other.
    """
    if holds < LEAST_HOLDS:
        return 0.0, None
    hold_ms = max(LONG_MS + 1.0, 2 * waited_ms / holds - LONG_MS)
    by_count = holds / probes * hold_ms / (hold_ms - LONG_MS)
    by_time = (waited_ms + holds * slept_ms / probes / 2) / (waited_ms + slept_ms)
    return min(1.0, max(by_count, by_time)), round(hold_ms, 1)
