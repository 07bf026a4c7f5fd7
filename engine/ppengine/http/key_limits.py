"""Limits of API keys: requests and tokens a minute, in buckets that fill again, and requests at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ppengine.http.api_errors import ApiError
from ppengine.http.shared_use import SharedUse
from ppengine.protocol.clients import KeyLimit

MOST = 2**40
"""The highest limit."""


class _Bucket:
    """A bucket of `limit` tokens that fills within a minute. It may be overdrawn."""

    def __init__(self, limit: int, now: float) -> None:
        self.limit, self._level, self._at = limit, float(limit), now

    def level(self, now: float) -> float:
        """Return how much is left."""
        passed, self._at = max(0.0, now - self._at), now
        self._level = min(float(self.limit), self._level + passed * self.limit / 60)
        return self._level

    def take(self, amount: int) -> None:
        """Take an amount."""
        self._level -= amount

    def wait(self, now: float) -> float:
        """Return the seconds until one is left; 0: there is."""
        return max(0.0, 1.0 - self.level(now)) * 60 / self.limit

    def headers(self, kind: str, now: float) -> dict[str, str]:
        """Return the headers that show the bucket, as OpenAI writes them."""
        level = self.level(now)
        full = (self.limit - level) * 60 / self.limit
        return {
            f"x-ratelimit-limit-{kind}": str(self.limit),
            f"x-ratelimit-remaining-{kind}": str(max(0, math.floor(level))),
            f"x-ratelimit-reset-{kind}": f"{full:.3f}s",
        }


LIMIT_HEADERS = [
    f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset") for kind in ("requests", "tokens")
]
"""Headers of answers to a key with limits."""


class KeyLimits:
    """Limits of all keys, over all HTTP processes."""

    def __init__(
        self, limits: Mapping[str, KeyLimit], use: SharedUse | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`use` counts the keys of `limits`; None if there are none."""
        self._clock = clock
        self._keys = {name: _Key(name, limit, use, clock()) for name, limit in limits.items() if use is not None}

    def enter(self, name: str) -> Grant | None:
        """Take a request of a key; None: it has no limits. Raises ApiError with status 429, and takes nothing."""
        key = self._keys.get(name)
        return None if key is None else key.enter(self._clock)


class _Key:
    """One key and its buckets."""

    def __init__(self, name: str, limit: KeyLimit, use: SharedUse, now: float) -> None:
        self.name, self.limit, self.use = name, limit, use
        requests, tokens = limit.requests_per_minute, limit.tokens_per_minute
        self.requests = None if requests is None else _Bucket(requests, now)
        self.tokens = None if tokens is None else _Bucket(tokens, now)

    def enter(self, clock: Callable[[], float]) -> Grant:
        now, most, others = clock(), self.limit.concurrent, self.use.others(self.name)
        if self.requests is not None:
            self.requests.take(others.requests)
        if self.tokens is not None:
            self.tokens.take(others.tokens)
        opened = others.open + self.use.own(self.name).open
        if most is not None and opened >= most:
            raise self._refused(f"{opened} requests are open, {most} may be at once", 1.0, now)
        if self.requests is not None and (wait := self.requests.wait(now)) > 0:
            raise self._refused(f"it may send {self.requests.limit} requests a minute", wait, now)
        if self.tokens is not None and (wait := self.tokens.wait(now)) > 0:
            raise self._refused(f"it may use {self.tokens.limit} tokens a minute", wait, now)
        if self.requests is not None:
            self.requests.take(1)
        self.use.add(self.name, requests=1, opened=1)
        return Grant(self, clock)

    def headers(self, now: float) -> dict[str, str]:
        """Return the headers that show the buckets."""
        requests = {} if self.requests is None else self.requests.headers("requests", now)
        return requests | ({} if self.tokens is None else self.tokens.headers("tokens", now))

    def _refused(self, why: str, wait: float, now: float) -> ApiError:
        text = f"the key {self.name} has reached its limit: {why}; try again in {wait:.1f} s"
        error = ApiError(
            429, "rate_limit_error", text, code="rate_limit_exceeded", retry_after_s=max(1, math.ceil(wait))
        )
        error.more_headers = self.headers(now)
        return error


@dataclass(eq=False)
class Grant:
    """One request that was taken."""

    _key: _Key
    _clock: Callable[[], float]
    _open: bool = True

    def spend(self, tokens: int) -> None:
        """Count tokens of its prompt or output."""
        if self._key.tokens is not None and tokens:
            self._key.tokens.take(tokens)
            self._key.use.add(self._key.name, tokens=tokens)

    def leave(self) -> None:
        """End the request. Only the first call counts."""
        if self._open:
            self._open = False
            self._key.use.add(self._key.name, opened=-1)

    def headers(self) -> dict[str, str]:
        """Return the headers of its answer."""
        return self._key.headers(self._clock())
