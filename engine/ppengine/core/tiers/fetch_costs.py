"""Predicted times of fetches and of prefills, from measured ones: chunks are fetched only where that is faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

FASTER = 0.8
"""A fetch is begun if its predicted time is below this share of the prefill's."""
TRIAL_S = 10.0
"""Seconds after which chunks of a backend that was too slow are read, so that its rate can recover."""
_KEEP = 0.85
"""Weight that each sample leaves to those before it; for fetches also each second since the one before it.

Otherwise it takes 30 trials, five minutes, until a backend that was stuck for a moment is used again.
"""
_LEAST_S = 1e-6


@dataclass(eq=False, slots=True)
class LineFit:
    """A straight line through recent points, by least squares with weights that decay."""

    _weight: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def add(self, x: float, y: float, keep: float = _KEEP) -> None:
        """Take a point. `keep`: weight that is left to those before it."""
        for name, value in (("_weight", 1.0), ("_x", x), ("_y", y), ("_xx", x * x), ("_xy", x * y)):
            setattr(self, name, getattr(self, name) * keep + value)

    def at(self, x: float) -> float | None:
        """Return the predicted y at `x`, never below 0; None without a point."""
        if not self._weight:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = (self._xy / self._weight - mean_x * mean_y) / spread if spread > 1e-3 * mean_x * mean_x else -1.0
        if slope < 0 or mean_y < slope * mean_x:
            # Points of one size, or a line that makes no sense: time in proportion to the size.
            return mean_y * x / mean_x if mean_x else mean_y
        return mean_y + slope * (x - mean_x)


class Decision(NamedTuple):
    """Whether to fetch, with both predicted times in seconds; None: not known."""

    fetch: bool
    fetch_s: float | None
    compute_s: float | None
    trial: bool = False
    """Whether chunks should be read beside the request, to measure the backend again."""


@dataclass(eq=False)
class Costs:
    """Seconds a token of prefill under the present load, and seconds by bytes of each backend."""

    _clock: Callable[[], float]
    token_s: float | None = field(init=False, default=None)
    """Seconds a token of prefill; None: not measured."""
    _lines: dict[str, LineFit] = field(init=False, default_factory=dict)
    _under_way: dict[str, int] = field(init=False, default_factory=dict)
    """Bytes that are being fetched, by backend: they are in front of later ones."""
    _tried: dict[str, float] = field(init=False, default_factory=dict)
    """Time of the newest fetch of each backend."""
    _sampled: dict[str, float] = field(init=False, default_factory=dict)
    """Time of the newest sample of each backend."""

    def computed(self, tokens: int, seconds: float) -> None:
        """Take a retired step: `seconds` since it was sent, or since the step before it had retired."""
        if tokens < 1:
            return
        sample = max(seconds, _LEAST_S) / tokens
        # A step of a few tokens says little about long prompts.
        share = (1 - _KEEP) * min(1.0, tokens / 256)
        self.token_s = sample if self.token_s is None else self.token_s + share * (sample - self.token_s)

    def begun(self, backend: str, size: int) -> None:
        """Note that `size` bytes, of the place with the most, are asked of a backend."""
        self._under_way[backend] = self._under_way.get(backend, 0) + size
        self._tried[backend] = self._clock()

    def ended(self, backend: str, size: int, seconds: float | None, ahead: int = 0) -> None:
        """Note the end of that fetch. `seconds` None: it says nothing about the rate. `ahead`: bytes in front of it."""
        self._under_way[backend] = max(0, self._under_way.get(backend, 0) - size)
        if seconds is not None:
            now = self._clock()
            keep = _KEEP ** max(1.0, now - self._sampled.get(backend, now))
            self._sampled[backend] = now
            self._lines.setdefault(backend, LineFit()).add(float(size + ahead), max(seconds, _LEAST_S), keep)

    def ahead(self, backend: str) -> int:
        """Return the bytes under way of a backend."""
        return self._under_way.get(backend, 0)

    def forget(self, backend: str) -> None:
        """Drop the rate of a backend that was changed or removed."""
        for known in (self._lines, self._under_way, self._tried, self._sampled):
            known.pop(backend, None)

    def fetch_s(self, sizes: Mapping[str, int]) -> float | None:
        """Return the predicted seconds of a fetch of `sizes` bytes by backend; None: a rate is not known."""
        total = 0.0
        for backend, size in sizes.items():
            line = self._lines.get(backend)
            seconds = None if line is None else line.at(float(size + self.ahead(backend)))
            if seconds is None:
                return None
            total += seconds
        return total

    def measured(self, backend: str) -> bool:
        """Return whether the rate of a backend is known."""
        return backend in self._lines

    def cheapest_first(self, backends: Iterable[str], size: int) -> list[str]:
        """Return backends by their predicted seconds for `size` bytes; last those that were never measured."""

        def seconds(backend: str) -> float:
            predicted = self.fetch_s({backend: size})
            return math.inf if predicted is None else predicted

        return sorted(backends, key=seconds)

    def decide(self, sizes: Mapping[str, int], tokens: int) -> Decision:
        """Return whether to fetch `sizes` bytes by backend in place of computing `tokens`; no if a rate is unknown."""
        fetch_s = self.fetch_s(sizes)
        compute_s = None if self.token_s is None else self.token_s * tokens
        if fetch_s is None or compute_s is None:
            return Decision(False, fetch_s, compute_s)
        if fetch_s < FASTER * compute_s:
            return Decision(True, fetch_s, compute_s)
        now = self._clock()
        trial = all(now - self._tried.get(backend, now - TRIAL_S) >= TRIAL_S for backend in sizes)
        return Decision(False, fetch_s, compute_s, trial)
