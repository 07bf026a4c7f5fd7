"""How much one key may ask for: commands and bytes a second, in buckets that fill again."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

COMMANDS_S, COMMANDS_MOST = 200.0, 1000.0
"""Commands a second of one key, and those that it may send at once after a pause."""
BYTES_S, BYTES_MOST = 8.0 * 1024**2, 64.0 * 1024**2
"""Bytes of commands, likewise."""
_KEYS_MOST = 10_000


class _Bucket(msgspec.Struct):
    commands: float
    bytes: float
    at: float


class RateLimits:
    """Buckets of all keys."""

    def __init__(self) -> None:
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, key: str, size: int, now: float) -> float:
        """Take one command of `size` bytes; return 0, or the seconds until there is room for it: nothing is taken."""
        bucket = self._buckets.setdefault(key, _Bucket(COMMANDS_MOST, BYTES_MOST, now))
        self._buckets.move_to_end(key)
        if len(self._buckets) > _KEYS_MOST:
            self._buckets.popitem(last=False)
        passed, bucket.at = max(0.0, now - bucket.at), now
        bucket.commands = min(COMMANDS_MOST, bucket.commands + passed * COMMANDS_S)
        bucket.bytes = min(BYTES_MOST, bucket.bytes + passed * BYTES_S)
        wait = max((1.0 - bucket.commands) / COMMANDS_S, (size - bucket.bytes) / BYTES_S)
        if wait > 0.0:
            return wait
        bucket.commands -= 1.0
        bucket.bytes -= size
        return 0.0
