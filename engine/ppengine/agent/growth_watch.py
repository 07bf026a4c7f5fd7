"""Does the memory of a stage grow without end? Looks at what it holds beside KV cache and swap space.

A leak grows evenly, to a height that the process never had. Memory that settles (a cache, an allocator's) grows less
and less; loading and warm-up are over before a stage serves, and the activations of boot's largest batch are allowed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from ppengine.common.cgroup_limits import MemoryLimit
from ppengine.protocol.stage_samples import GrowthSample

WINDOWS_S = {6.0: 300.0, 10.0: 1200.0, 20.0: 2400.0, 60.0: 3600.0, 180.0: 21_600.0}
"""Seconds over which a growth is looked for, and the most until it meets a limit: one that has time is watched longer,
for it may settle."""
SHARED_WINDOWS_S = {6.0: inf, 10.0: inf, 60.0: inf}
"""The same for shared memory alone. A stage that serves has all that it needs of it, so no limit has to be near."""
LEAST_BYTES = 48 << 20
"""Least growth in one of them."""
EVEN = 0.2
"""Least share of the growth in each third of a window; a third is even."""
KEEPS_ON = 0.85
"""Least growth in the last third, in those of the first, of a growth that does not settle."""
FULL = 0.8
"""Least part of a window for which there are looks."""
HASTY_BYTES = 8 << 20
"""Growth between two looks after which the next one comes soon."""
_PARTS = 3


class _Look(NamedTuple):
    at_s: float
    size: int


class GrowthWatch:
    """Watches one process. Call `look` whenever its memory has been read, at most once a second."""

    def __init__(self, windows_s: Mapping[float, float] = WINDOWS_S) -> None:
        self._windows_s = windows_s
        self._looks: deque[_Look] = deque()
        self._least: int | None = None
        """Least size since it serves."""
        self._highest = 0
        """Greatest size that has left the longest window."""
        self._activations = 0
        self._since: float | None = None

    @property
    def hasty(self) -> bool:
        """Whether it has just grown so much that the next look must come soon."""
        return len(self._looks) > 1 and self._looks[-1].size - self._looks[-2].size >= HASTY_BYTES

    @property
    def grows(self) -> bool:
        """Whether there is a growth, for which the limits count."""
        return any(self._growth(window_s) is not None for window_s in self._windows_s)

    def look(self, at_s: float, size: int, *, serving: bool, activations: int = 0) -> None:
        """Enter the bytes at a moment. `activations`: bytes that a batch may need for a while."""
        if not serving:
            # It loads, or meets its neighbours again: that memory is its own, and no growth.
            self._highest = max(self._highest, size)
            self._looks.clear()
            self._least = None
            return
        self._least = size if self._least is None else min(self._least, size)
        self._looks.append(_Look(at_s, size))
        while at_s - self._looks[0].at_s > max(self._windows_s) + 1.0:
            self._highest = max(self._highest, self._looks.popleft().size)
        self._activations = activations

    def sample(self, limits: Sequence[MemoryLimit], host_left: int | None) -> GrowthSample | None:
        """Return the growth of this moment and the limit that it meets first; None: it does not grow."""
        ends = [(limit.left, str(limit.file)) for limit in limits]
        left, file = min(ends + ([] if host_left is None else [(host_left, "")]), default=(0, ""))
        for window_s, until_s in self._windows_s.items():
            growth = self._growth(window_s) if ends or host_left is not None else None
            if growth is None or left > until_s * growth[1] / growth[0]:
                continue
            (seconds, grown), newest = growth, self._looks[-1].at_s
            self._since = newest - seconds if self._since is None else self._since
            for_ms = round((newest - self._since) * 1e3, 1)
            return GrowthSample(rate=grown / seconds, grown=grown, over_s=seconds, for_ms=for_ms, left=left, file=file)
        self._since = None
        return None

    def _growth(self, window_s: float) -> tuple[float, int] | None:
        """Return seconds and bytes of an even growth in the window, above all that was before; None: there is none."""
        looks = [look for look in self._looks if look.at_s >= self._looks[-1].at_s - window_s]
        if len(looks) <= _PARTS or self._least is None:
            return None
        first, last = looks[0], looks[-1]
        seconds, grown = last.at_s - first.at_s, last.size - first.size
        before = max([self._highest, *(look.size for look in self._looks if look.at_s < first.at_s)])
        new_high = last.size > max(before, *(look.size for look in looks[:-1]))
        if seconds < FULL * window_s or grown < LEAST_BYTES or not new_high:
            return None
        if last.size - self._least < self._activations + LEAST_BYTES:
            return None
        marks = [_size_at(looks, first.at_s + seconds * part / _PARTS) for part in range(_PARTS + 1)]
        parts = [after - before for before, after in pairwise(marks)]
        settles = self._since is None and parts[-1] < KEEPS_ON * parts[0]
        return None if settles or min(parts) < EVEN * grown else (seconds, grown)


def _size_at(looks: Sequence[_Look], at_s: float) -> float:
    """Return the size at a moment, on the line between two looks."""
    for before, after in pairwise(looks):
        if after.at_s >= at_s:
            part = (at_s - before.at_s) / max(1e-9, after.at_s - before.at_s)
            return before.size + part * (after.size - before.size)
    return float(looks[-1].size)
