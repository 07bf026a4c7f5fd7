"""Limits of one key: commands, their bytes, and questions a second, in buckets that fill again."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

COMMANDS_S, COMMANDS_MOST = 200.0, 1000.0
"""Commands a second of one key, and those that it may send at once after a pause."""
BYTES_S, BYTES_MOST = 8.0 * 1024**2, 64.0 * 1024**2
"""Bytes of commands, likewise."""
QUESTIONS_S, QUESTIONS_MOST = 100.0, 1000.0
"""Questions, likewise. Fetches are not counted: a stream has one for each piece of its text."""
_KEYS_MOST = 10_000


class _Bucket(msgspec.Struct):
    count: float
    bytes: float
    at: float


class RateLimits:
    """Buckets of all keys."""

    def __init__(self, per_s: float = COMMANDS_S, most: float = COMMANDS_MOST) -> None:
        """Let each key send `per_s` messages a second, and `most` at once after a pause."""
        self._per_s, self._most = per_s, most
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, key: str, size: int, now: float) -> float:
        """Take one message of `size` bytes; return 0, or the seconds until there is room for it: nothing is taken."""
        bucket = self._buckets.setdefault(key, _Bucket(self._most, BYTES_MOST, now))
        self._buckets.move_to_end(key)
        if len(self._buckets) > _KEYS_MOST:
            self._buckets.popitem(last=False)
        passed, bucket.at = max(0.0, now - bucket.at), now
        bucket.count = min(self._most, bucket.count + passed * self._per_s)
        bucket.bytes = min(BYTES_MOST, bucket.bytes + passed * BYTES_S)
        wait = max((1.0 - bucket.count) / self._per_s, (size - bucket.bytes) / BYTES_S)
        if wait > 0.0:
            return wait
        bucket.count -= 1.0
        bucket.bytes -= size
        return 0.0
